"""Bodies that no harness would send: arbitrary JSON in every place of a request, and damaged copies of valid ones."""

import json
import random
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

DEEP: Any = [[[]]]
for _ in range(70):
    DEEP = [DEEP]
JUNK: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, 2**64, 10**40, 1.5, -0.0, "", " ", "x" * 3000, "\ud83d", "\x00", "<|im_end|>", "{",
    '{"a":1}', "[1", "[" * 3000, [], {}, [[]], {"": {}}, {"a": None}, ["x", 1], DEEP, {"type": "text"},
    {"role": "user"}, {"type": "tool_result"}, {"type": "function"}, "tool", "assistant", "system",
]  # fmt: skip
TOOL = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "model": "m", "max_tokens": 20, "stream": False, "metadata": {"user_id": '{"session_id":"s"}'},
        "system": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "f", "description": "d", "input_schema": TOOL}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "go"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "text", "text": "yes"},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "out"}]},
        ],
    },
    "/v1/chat/completions": {
        "model": "m", "max_tokens": 20, "max_completion_tokens": 20, "stream": False, "n": 1, "metadata": {"k": "v"},
        "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": TOOL}}],
        "messages": [
            {"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "go"}]},
            {"role": "assistant", "content": "yes", "reasoning_content": "t", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "out"},
        ],
    },
    "/v1/responses": {
        "model": "m", "max_output_tokens": 20, "stream": False, "instructions": "S", "metadata": {"k": "v"},
        "client_metadata": {"k": "v"}, "previous_response_id": None,
        "tools": [{"type": "function", "name": "f", "description": "d", "parameters": TOOL},
                  {"type": "custom", "name": "g"},
                  {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "h", "parameters": TOOL}]}],
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "out"},
        ],
    },
}  # fmt: skip
REQUESTS["/v1/messages/count_tokens"] = REQUESTS["/v1/messages"]


def damaged(request: dict[str, Any], rng: random.Random) -> bytes:
    """A copy with one to three faults in its structure, and sometimes one in its bytes."""
    body = json.loads(json.dumps(request))
    for _ in range(rng.randint(1, 3)):
        _damage(rng, body)
    raw = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    return _damage_bytes(rng, raw) if rng.random() < 0.4 else raw


def continued(request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """The request that a harness sends after `answer` to `request`: it echoes the turn and adds a result or a word."""
    if "output" in answer:
        items = answer["output"]
        calls = [item["call_id"] for item in items if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": call, "output": "out"} for call in calls]
        said = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "on"}]}]
        return {**request, "input": [*_listed(request["input"]), *items, *(results or said)]}
    if "choices" in answer:
        turn = answer["choices"][0]["message"]
        tools = [{"role": "tool", "tool_call_id": call["id"], "content": "out"} for call in turn.get("tool_calls", ())]
        return {**request, "messages": [*request["messages"], turn, *(tools or [{"role": "user", "content": "on"}])]}
    uses = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
    blocks = [{"type": "tool_result", "tool_use_id": use, "content": "out"} for use in uses]
    turn = {"role": "assistant", "content": answer["content"]}
    return {**request, "messages": [*request["messages"], turn, {"role": "user", "content": blocks or "on"}]}


def _listed(items: Any) -> list[Any]:
    return items if isinstance(items, list) else [{"type": "message", "role": "user", "content": items}]


def _damage(rng: random.Random, body: Any) -> None:
    places = list(_places(body))
    if not places:
        return
    parent, key = rng.choice(places)
    match rng.randrange(6):
        case 0 | 1:
            parent[key] = _junk(rng)
        case 2:
            del parent[key]
        case 3 if isinstance(parent, dict):
            parent[rng.choice(["type", "role", "content", "id", "x", ""])] = parent.pop(key)
        case 4 if isinstance(parent, list):
            parent[key:key] = [parent[key]] * rng.choice([1, 2, 50])
        case _:
            other, at = rng.choice(places)
            parent[key] = json.loads(json.dumps(other[at])) if _has(other, at) else _junk(rng)


def _junk(rng: random.Random) -> Any:
    # A copy: later damage may go into it, and must reach neither the next example nor, in a circle, itself.
    return deepcopy(rng.choice(JUNK))


def _damage_bytes(rng: random.Random, raw: bytes) -> bytes:
    at = rng.randrange(len(raw) + 1)
    match rng.randrange(6):
        case 0:
            return raw[:at]
        case 1:
            return raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
        case 2:
            return (
                raw[:at]
                + rng.choice([b"\xff\xfe", b"\xed\xa0\xbd", b"\x00", b"\\ud83d", b"NaN", b"1e999", b","])
                + raw[at:]
            )
        case 3:  # a key twice
            return raw.replace(b"{", b'{"messages":[],"type":7,"role":"user",', 1)
        case 4:
            return raw.replace(b'"m"', rng.choice([b"-Infinity", b"1" * 5000, b"[" * 3000, b'"\\u0000"', b"tru"]), 1)
        case _:
            return raw + rng.choice([b"{}", b" ", b"\x00", raw])


def _places(value: Any) -> Any:
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def _has(parent: Any, key: Any) -> bool:
    return key in parent if isinstance(parent, dict) else isinstance(key, int) and key < len(parent)


def arbitrary() -> st.SearchStrategy[bytes]:
    """JSON of fields and words that the APIs know, put together at random."""
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    anything = st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    )  # fmt: skip
    names = st.sampled_from(
        ["role", "content", "type", "text", "tool_calls", "tool_use_id", "input", "name", "function", "arguments",
         "id", "call_id", "output", "summary", "thinking", "tool_call_id"]
    )  # fmt: skip
    words = st.sampled_from(
        ["user", "assistant", "system", "tool", "text", "tool_use", "tool_result", "function", "function_call",
         "function_call_output", "reasoning", "message", "thinking", "{}", '{"a":1}', "input_text"]
    )  # fmt: skip
    part = st.dictionaries(names, words | anything, max_size=5)
    nested = st.dictionaries(names, words | anything | part | st.lists(part, max_size=3), max_size=5)
    fields = ["messages", "input", "tools", "system", "max_tokens", "stream", "metadata", "instructions", "model", "n"]
    bodies = st.dictionaries(st.sampled_from(fields), anything | nested | st.lists(nested, max_size=4), max_size=5)
    good = {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": "x"}], "input": "x"}
    return st.builds(
        lambda body, whole: json.dumps({**good, **body} if whole else body).encode(), bodies, st.booleans()
    )
