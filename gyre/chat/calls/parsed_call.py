"""A call as the policy wrote it, and whether a harness can be given it."""

import json
from typing import Any

import msgspec

from gyre.chat.calls.schema_values import is_finite
from gyre.chat.conversation import is_shallow


class ParsedCall(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: dict[str, Any] | str
    """A string (the raw block) only when ok is False."""
    raw: str
    """The call, or the block it is in, as the policy wrote it."""
    ok: bool
    id: str = ""
    """As the policy wrote it, in families whose calls have one."""


def call_arguments(arguments: Any) -> dict[str, Any] | str:
    """Arguments as a mapping when they are one, or the JSON text of one; otherwise as text."""
    if isinstance(arguments, dict):
        return arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    return json.dumps(arguments)


def can_be_sent(name: str, arguments: dict[str, Any] | str) -> bool:
    """Whether a harness can be given this call and echo it: arguments are an object, no deeper than those of requests,
    numbers are finite, and text is Unicode (JSON can spell half a surrogate pair)."""
    if not isinstance(arguments, dict) or not is_shallow(arguments) or not is_finite(arguments):
        return False
    try:
        msgspec.json.encode((name, arguments))
    except UnicodeEncodeError:
        return False
    return True
