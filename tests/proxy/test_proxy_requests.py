"""What the dialects read: the shapes that harnesses really send (docs/harnesses.md)."""

from typing import Any

import msgspec
import pytest

from gyre.chat.calls.parsed_call import can_be_sent
from gyre.chat.conversation import Message, ToolCall
from gyre.proxy.dialects import DIALECTS
from gyre.proxy.dialects.base import ToolForm, WireRequest
from gyre.proxy.dialects.memo import Memo
from gyre.proxy.errors import CallError
from gyre.proxy.session.role_facts import call_facts
from gyre.trajectory.roles import RoleMarkers


def read(dialect: str, body: dict[str, Any] | bytes, **headers: str) -> WireRequest:
    raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return DIALECTS[dialect].read(raw, {name.replace("_", "-"): value for name, value in headers.items()}, Memo())


def messages(dialect: str, body: dict[str, Any]) -> list[Message]:
    return list(read(dialect, body).conversation.messages)


def test_anthropic_history_becomes_canonical() -> None:
    assistant = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "  "},
        {"type": "tool_use", "id": "call_1", "name": "Bash", "input": {"command": "ls"}},
        {"type": "text", "text": "after"},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "out"},
         {"type": "image", "source": {"type": "base64", "data": "QQ==", "media_type": "image/png"}}]},
        {"is_error": True, "type": "tool_result", "content": "Exit code 3\n", "tool_use_id": "call_2"},
        {"type": "tool_result", "tool_use_id": "call_3", "content": [{"type": "tool_reference", "tool_name": "Web"}]},
        {"type": "text", "text": "reminder", "cache_control": {"type": "ephemeral"}},
    ]  # fmt: skip
    body = {
        "model": "m",
        "system": [{"type": "text", "text": "x-anthropic-billing-header: cc_is_subagent=true;"},
                   {"type": "text", "text": "A"}, {"type": "text", "text": "B"}],
        "messages": [{"role": "user", "content": "go"}, {"role": "system", "content": "skills"},
                     {"role": "assistant", "content": assistant}, {"role": "user", "content": results}],
        "thinking": {"type": "adaptive"}, "context_management": {"edits": []}, "output_config": {"effort": "high"},
        "tools": [{"name": "Bash", "description": "d", "input_schema": {"type": "object"}, "defer_loading": True},
                  {"type": "web_search_20250305", "name": "web_search"}],
    }  # fmt: skip
    wire = read("anthropic", body)
    assert list(wire.conversation.messages) == [
        Message(role="system", text="A\nB"),
        Message(role="user", text="go"),
        Message(role="system", text="skills"),
        Message(
            role="assistant", text="after", reasoning="hm", tool_calls=(ToolCall("call_1", "Bash", {"command": "ls"}),)
        ),
        Message(role="tool", text="out\n[image omitted]", tool_call_id="call_1"),
        Message(role="tool", text="Exit code 3\n", tool_call_id="call_2"),
        Message(role="tool", text="[tool_reference: Web]", tool_call_id="call_3"),
        Message(role="user", text="reminder"),
    ]
    assert [tool.name for tool in wire.conversation.tools] == ["Bash"]
    assert "cc_is_subagent=true" in call_facts(wire, "", RoleMarkers()).system
    assert (wire.facts.stream, wire.facts.max_tokens) == (False, None)


def test_string_and_blocks_are_the_same_message() -> None:
    blocks = [{"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}}]
    one = messages("anthropic", {"messages": [{"role": "user", "content": "go"}]})
    assert one == messages("anthropic", {"messages": [{"role": "user", "content": blocks}]})
    assert one == messages("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "go"}]}]})
    assert one == messages("responses", {"input": "go"})
    assert one == messages(
        "responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "go"}]}]}
    )


def test_chat_history_becomes_canonical() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": ' {"a" : 1.0}\n'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "bash", "arguments": '{"a": '}}
    empty = {"id": "c3", "type": "function", "function": {"name": "bash", "arguments": ""}}
    history = [
        {"role": "developer", "content": "S"},
        {"role": "assistant", "tool_calls": [call, broken, empty], "reasoning_content": "r"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "out"}]},
        {"role": "assistant", "content": None},
        {
            "role": "user",
            "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}],
        },
    ]
    assert messages("chat", {"messages": history}) == [
        Message(role="system", text="S"),
        Message(
            role="assistant",
            reasoning="r",
            tool_calls=(
                ToolCall("c1", "bash", {"a": 1.0}), ToolCall("c2", "bash", '{"a": '), ToolCall("c3", "bash", {})
            ),
        ),
        Message(role="tool", text="out", tool_call_id="c1"),
        Message(role="assistant"),
        Message(role="user", text="see\n[image_url omitted]"),
    ]  # fmt: skip


def test_responses_items_are_grouped_into_turns() -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "S"}]},
        {"role": "user", "content": "go"},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "e"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
        {"type": "function_call", "name": "f", "namespace": "n", "call_id": "c1", "arguments": "{}"},
        {"type": "custom_tool_call", "name": "patch", "call_id": "c2", "input": "+x"},
        {"type": "function_call_output", "call_id": "c1", "output": "o1"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "o2"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "one"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
    ]
    tools = [
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f", "parameters": {}}]},
        {"type": "custom", "name": "patch", "description": "d"},
        {"type": "function", "name": "g", "parameters": None},
        {"type": "web_search"},
    ]
    wire = read("responses", {"input": items, "tools": tools})
    calls = (ToolCall("c1", "f", {}), ToolCall("c2", "patch", {"input": "+x"}))
    assert list(wire.conversation.messages) == [
        Message(role="system", text="S"),
        Message(role="user", text="go"),
        Message(role="assistant", text="t", reasoning="hm", tool_calls=calls),
        Message(role="tool", text="o1", tool_call_id="c1"),
        Message(role="tool", text="o2", tool_call_id="c2"),
        Message(role="assistant", text="one"),
        Message(role="assistant", text="two"),
    ]
    assert [tool.name for tool in wire.conversation.tools] == ["f", "patch", "g"]
    assert wire.facts.tool_forms == {"f": ToolForm("f", "n"), "patch": ToolForm("patch", custom=True)}


def test_a_request_that_relies_on_stored_responses_is_refused() -> None:
    """Answering it without its history would be a silent other prompt."""
    with pytest.raises(CallError, match="send the whole input"):
        read("responses", {"input": "go", "previous_response_id": "resp_1"})


def test_half_a_surrogate_pair_is_replaced_not_refused() -> None:
    body = rb'{"messages":[{"role":"user","content":"cut \ud83d here, whole \ud83d\ude00"}]}'
    wire = read("chat", body)
    assert wire.conversation.messages[0].text == "cut \ufffd here, whole \U0001f600"


@pytest.mark.parametrize("depth", range(62, 68))
def test_a_call_that_is_sent_is_not_too_deep_to_come_back(depth: int) -> None:
    arguments = "[" * depth + "]" * depth
    echo = b'{"input":[{"type":"function_call","call_id":"c","name":"f","arguments":%s}]}'
    body = echo % msgspec.json.encode(f'{{"a":{arguments}}}')
    if can_be_sent("f", {"a": msgspec.json.decode(arguments)}):
        read("responses", body)
    else:
        with pytest.raises(CallError, match="nested deeper"):
            read("responses", body)


def test_facts_flatten_nested_metadata_and_hide_credentials() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "metadata": {"user_id": '{"session_id":"s1"}', "n": 3}}
    turn = '{"request_kind":"compaction","window_number":2}'
    wire = read("anthropic", body, X_Api_Key="secret", Authorization="Bearer secret", X_Codex_Turn_Metadata=turn)
    facts = call_facts(wire, "main", RoleMarkers())
    assert (facts.metadata["session_id"], facts.metadata["n"]) == ("s1", "3")
    assert facts.metadata["request_kind"] == "compaction"
    assert "secret" not in str(facts)


def test_the_task_of_an_agent_is_what_comes_before_its_first_own_turn() -> None:
    turns = [("user", "Setup."), ("assistant", "Got it."), ("user", "Task."), ("assistant", "Yes."), ("user", "More.")]
    wire = read("chat", {"messages": [{"role": role, "content": text} for role, text in turns]})
    assert call_facts(wire, "", RoleMarkers(canned_assistant=["Got it."])).first_user == "Setup.\nTask."
    assert call_facts(wire, "", RoleMarkers()).first_user == "Setup."


DEEP = b"[" * 5000 + b"]" * 5000
SCHEMA = b'{"a":' + b"[" * 200 + b"]" * 200 + b"}"
USER = b'{"role":"user","content":"x"}'


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b"{", b'{"messages":[],"input":[]}', b'{"messages":5,"input":5}', b"\xff\xfe", DEEP,
        b'{"messages":[' + USER + b'],"input":"x","max_tokens":1e400,"max_output_tokens":1e400}',
        b'{"messages":[' + USER + b'],"input":"x","max_tokens":-1,"max_output_tokens":-1}',
        b'{"messages":[' + USER + b'],"input":"x","stream":"yes"}',
        b'{"messages":[{"role":"wizard","content":"x"}],"input":[{"role":"wizard","content":"x"}]}',
        b'{"messages":[{"role":"user","content":7}],"input":[{"role":"user","content":7}]}',
        b'{"messages":[{"role":"user","content":"\\ud83d"}],"input":[{"type":"odd"}],"x":NaN}',
        b'{"messages":[' + USER + b'],"input":"x","tools":[{"type":"function","name":"f","parameters":' + SCHEMA
        + b',"function":{"name":"f","parameters":' + SCHEMA + b'},"input_schema":' + SCHEMA + b"}]}",
    ],
)  # fmt: skip
def test_bad_bodies_are_refused_with_a_reason(dialect: str, body: bytes) -> None:
    with pytest.raises(CallError) as caught:
        read(dialect, body)
    assert caught.value.fault == "invalid"
    assert len(caught.value.message) > 10


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        ("anthropic", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
        ("chat", {"functions": [{"name": "f"}]}),
        ("chat", {"tools": [{"type": "custom", "custom": {"name": "c"}}]}),
        ("chat", {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]}),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "custom": {"name": "c"}}]}]}),
        ("chat", {"max_completion_tokens": 0}),
        ("responses", {"conversation": "conv_1"}),
        ("responses", {"prompt": {"id": "pmpt_1"}}),
        ("responses", {"tools": [{"type": "local_shell"}]}),
        ("responses", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ],
)
def test_what_the_policy_would_miss_is_refused(dialect: str, body: dict[str, Any]) -> None:
    turn = {"role": "user", "content": "x"}
    with pytest.raises(CallError) as caught:
        read(dialect, {"messages": [turn], "input": [turn], **body})
    assert caught.value.fault == "invalid"


@pytest.mark.parametrize(("given", "read_as"), [("[1]", "[1]"), ([1], "[1]"), (None, {}), ({"a": 1}, {"a": 1})])
def test_a_call_with_arguments_that_are_no_object_keeps_their_text(given: Any, read_as: Any) -> None:
    turn = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": given}]}
    (message,) = messages("anthropic", {"messages": [turn]})
    assert message.tool_calls == (ToolCall("a", "f", read_as),)


def test_a_refusal_beside_the_content_is_text() -> None:
    body = {"messages": [{"role": "assistant", "content": None, "refusal": "No."}, {"role": "user", "content": "x"}]}
    assert read("chat", body).conversation.messages[0].text == "No."
