"""What a value is that a policy wrote between tags, by the schema of its parameter.

Tags do not tell text from JSON. Text stays exactly as it was written, blanks included, wherever the schema allows text
and the value is of no other allowed type. What fits no allowed type is for the tool to judge: JSON as JSON, all else as
text.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

_NAMES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
"""Templates write Python's spelling into the history (Qwen 3.5), so policies write it too."""
_NESTED = 8
"""Schemas followed from one to the next: a schema may refer to itself."""
_UNREAD = object()


def value_of(text: str, parameters: Mapping[str, Any], name: str, *, said: str = "") -> Any:
    """The argument `name` for `text`. `parameters` is the schema of the tool; `said` is what the markup itself tells of
    the value: "text", "json" or nothing. A type that the schema names decides over the markup."""
    types = set(_types(_property(parameters, name), parameters, _NESTED))
    if not types and said == "text":
        return text
    value = _json(text)
    if isinstance(value, str) and said != "json" and (not types or "string" in types):
        value = _UNREAD  # quotes are part of a text
    if types:
        fitting = _fitting(text.strip(), value, types)
        if fitting is not _UNREAD or "string" in types:
            return text if fitting is _UNREAD else fitting
    return text if value is _UNREAD else value


def is_finite(value: Any) -> bool:
    """Whether JSON can write a value: NaN and Infinity, which Python's reader takes, it cannot."""
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    if isinstance(value, list):
        return all(map(is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _fitting(text: str, value: Any, types: set[str]) -> Any:
    """The value in one of the allowed types, or _UNREAD."""
    if value is _UNREAD and text in _WORDS:
        value = _WORDS[text]
    kind = "" if value is _UNREAD else _NAMES[type(value)]
    if kind in types or (kind == "integer" and "number" in types):
        return value
    if kind == "number" and "integer" in types and value.is_integer():
        return int(value)
    return _UNREAD


def _json(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return _UNREAD
    return value if is_finite(value) else _UNREAD


def _property(parameters: Mapping[str, Any], name: str) -> Any:
    properties = parameters.get("properties")
    return properties.get(name) if isinstance(properties, dict) else None


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    """The JSON types that a schema allows; none where it does not say. Schemas are a harness's: nothing in them is
    certain to be well-formed."""
    if not isinstance(schema, dict) or not depth:
        return
    declared = schema.get("type")
    if isinstance(declared, str):
        yield declared
    elif isinstance(declared, list):
        yield from (name for name in declared if isinstance(name, str))
    elif "const" in schema:
        yield _NAMES.get(type(schema["const"]), "")
    elif isinstance(schema.get("enum"), list):
        yield from (_NAMES.get(type(value), "") for value in schema["enum"])
    for key in ("anyOf", "oneOf", "allOf"):
        for branch in schema[key] if isinstance(schema.get(key), list) else ():
            yield from _types(branch, root, depth - 1)
    if isinstance(schema.get("$ref"), str):
        yield from _types(_referenced(schema["$ref"], root), root, depth - 1)


def _referenced(reference: str, root: Any) -> Any:
    """What "#/$defs/name" names; None when it names nothing."""
    if not reference.startswith("#"):
        return None
    for part in reference[1:].split("/")[1:]:
        root = root.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root
