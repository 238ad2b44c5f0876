"""A history is read once: equal elements of later requests are the same objects, and nothing else changes."""

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.chat.conversation import Conversation
from gyre.chat.render import ChatRenderer
from gyre.proxy.dialects import DIALECTS
from gyre.proxy.dialects.memo import Memo
from gyre.proxy.errors import CallError
from gyre.proxy.session.tokenizer import PolicyTokenizer

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
HISTORIES: dict[str, list[dict[str, Any]]] = {
    "chat": [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "t", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "out"},
    ],
    "anthropic": [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "out"}]},
    ],
    "responses": [
        {"role": "user", "content": "go"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "out"},
    ],
}
TOOLS = {
    "chat": [{"type": "function", "function": {"name": "f"}}],
    "anthropic": [{"name": "f"}],
    "responses": [{"type": "custom", "name": "f"}],
}


def body(dialect: str, elements: list[dict[str, Any]], **more: Any) -> bytes:
    field = "input" if dialect == "responses" else "messages"
    return msgspec.json.encode({"model": "m", field: elements, "tools": TOOLS[dialect], **more})


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
def test_a_longer_history_shares_what_was_read(dialect: str) -> None:
    memo, read = Memo(), DIALECTS[dialect].read
    first = read(body(dialect, HISTORIES[dialect][:1]), {}, memo)
    second = read(body(dialect, HISTORIES[dialect]), {}, memo)
    assert first.conversation.messages[0] is second.conversation.messages[0]
    assert first.conversation.tools is second.conversation.tools
    fresh = read(body(dialect, HISTORIES[dialect]), {}, Memo())
    assert (fresh.conversation, fresh.identity) == (second.conversation, second.identity)
    assert first.identity != second.identity


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
def test_transport_is_no_part_of_the_identity(dialect: str) -> None:
    marked = [*HISTORIES[dialect][:2], {**HISTORIES[dialect][2], "cache_control": {"type": "ephemeral"}}]
    memo, read = Memo(), DIALECTS[dialect].read
    plain = read(body(dialect, HISTORIES[dialect]), {}, memo)
    assert read(body(dialect, marked, stream=True), {}, memo).identity == plain.identity
    assert read(body(dialect, HISTORIES[dialect][:2]), {}, memo).identity != plain.identity
    assert read(body(dialect, HISTORIES[dialect], tools=[]), {}, memo).identity != plain.identity


def test_the_same_bytes_in_another_place_are_read_anew() -> None:
    memo, read = Memo(), DIALECTS["chat"].read
    good = b'{"messages":[{"role":"user","content":"x"}],"tools":null}'
    read(good, {}, memo)
    with pytest.raises(CallError, match=r"messages\[0\]"):
        read(b'{"messages":[null],"tools":null}', {}, memo)
    with pytest.raises(CallError, match=r"messages\[0\]"):
        read(b'{"messages":[null],"tools":null}', {}, memo)
    shared = b'{"messages":[{"role":"user","content":"x"}]}'
    assert read(shared, {}, memo).conversation == DIALECTS["anthropic"].read(shared, {}, memo).conversation


@settings(max_examples=50, database=None)
@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 40))
def test_a_bounded_memo_answers_like_none(numbers: list[int], limit: int) -> None:
    memo = Memo(limit)
    for number in numbers:
        raw = msgspec.Raw(b'{"n":%d}' % number)
        element = memo.read(_number, raw, "x")
        assert element.value == number
        assert element.digest == Memo().read(_number, raw, "x").digest
        assert len(memo._recent) + len(memo._older) <= 2 * (limit // len(raw) + 1)


def _number(raw: msgspec.Raw, place: str) -> int:
    return int(msgspec.json.decode(raw)["n"])


@settings(max_examples=100, database=None, suppress_health_check=list(HealthCheck))
@given(st.text(max_size=40) | st.sampled_from(["a<|im_end|>b", " <think> x", "\n\n", "<tool_call>{}"]))
def test_the_policys_tokenizer_encodes_like_the_one_that_it_wraps(proxy_tokenizer: Any, text: str) -> None:
    fast = PolicyTokenizer(proxy_tokenizer)
    ids = fast.encode(text, add_special_tokens=False)
    assert ids == proxy_tokenizer.encode(text, add_special_tokens=False)
    assert fast.decode(ids) == proxy_tokenizer.decode(ids)


def test_renderers_build_the_same_prompt_without_offsets(proxy_tokenizer: Any) -> None:
    wire = DIALECTS["chat"].read(body("chat", HISTORIES["chat"]), {}, Memo())
    plain = ChatRenderer(proxy_tokenizer, "qwen3", thinking=False)
    fast = ChatRenderer(PolicyTokenizer(proxy_tokenizer), "qwen3", thinking=False)
    assert fast.render(wire.conversation) == plain.render(wire.conversation)
    prompt = plain.render(Conversation(wire.conversation.messages[:1], wire.conversation.tools))
    output = [*proxy_tokenizer.encode("t"), *plain.stop_token_ids[-1:]]
    assert fast.bridge(prompt, output, wire.conversation, 2) == plain.bridge(prompt, output, wire.conversation, 2)
