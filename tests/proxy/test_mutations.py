"""Every row of the mutation table (docs/harnesses.md): what harnesses do to a turn before they send it back.

Each case replays two exchanges through the session code. The turn must keep its sampled tokens: one path, nothing
encoded twice. What differs is counted as drift.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gyre.chat.conversation import Conversation, Message, ToolCall
from gyre.chat.render import ChatRenderer
from gyre.core.records import RoleClass
from gyre.replay.replay import ReplayReport, replay
from gyre.replay.traces import read_trace
from gyre.trajectory.call import PreparedCall, Sample
from gyre.trajectory.roles import RoleMarkers
from gyre.trajectory.tree import TrajectoryTree

Json = dict[str, Any]
Row = tuple[Json, Json, dict[str, int]]
"""Assistant message as the policy said it, as the harness echoed it, drift by kind."""


def said(*arguments: str, text: str | None = "Look.", name: str = "bash", **more: Any) -> Json:
    """A Chat message with one call per argument text."""
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": spelled}}
        for i, spelled in enumerate(arguments)
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls, **more}


NONE: dict[str, int] = {}
CHAT: dict[str, Row] = {
    "args whitespace": (said('{ "a" :  1 }\n'), said('{"a":1}'), NONE),
    "escapes": (said(r'{"a": "\u00e9\/\ud83d\ude00"}'), said('{"a":"é/😀"}'), NONE),
    "floats": (said('{"a": 10000.0, "b": 2e3, "c": -0.0}'), said('{"a":10000,"b":2000,"c":0}'), {"args_form": 1}),
    "large integers": (said('{"a": 12345678901234567890}'), said('{"a":12345678901234567000}'), {"args_form": 1}),
    "integer-like keys": (said('{"b": 1, "10": 2, "2": 3}'), said('{"2":3,"10":2,"b":1}'), {"args_form": 1}),
    "duplicate keys": (said('{"a": 1, "a": 2}'), said('{"a":2}'), NONE),
    "key order": (said('{"content": "x", "path": "y"}'), said('{"path":"y","content":"x"}'), {"args_form": 1}),
    "default added": (
        said('{"old": "x", "new": "y"}'),
        said('{"replace_all":false,"old":"x","new":"y"}'),
        {"args_default_added": 1},
    ),
    "strings coerced": (said('{"t": "10000", "b": "false"}'), said('{"t":10000,"b":false}'), {"args_changed": 1}),
    "trailing blanks of lines removed": (said(r'{"a": "x  \ny"}'), said(r'{"a": "x\ny"}'), {"args_changed": 1}),
    "cd prefix removed": (said('{"command": "cd /w && ls"}'), said('{"command":"ls"}'), {"args_changed": 1}),
    "escaped semicolon": (said(r'{"command": "find \\\\;"}'), said(r'{"command": "find \\;"}'), {"args_changed": 1}),
    "unknown keys": (said('{"a": 1, "zzz": 2}'), said('{"a":1,"zzz":2}'), NONE),
    "text trimmed": (said("{}", text="\n Look. \n"), said("{}"), NONE),
    "blank text dropped": (said("{}", text=" \n"), said("{}", text=None), NONE),
    "no text, content empty": (said("{}", text=None), said("{}", text=""), NONE),
    "reasoning trimmed": (
        said("{}", reasoning_content=" Hm. \n"),
        said("{}", reasoning_content="Hm."),
        NONE,
    ),
    "reasoning dropped": (said("{}", reasoning_content="Hm."), said("{}"), {"reasoning_dropped": 1}),
    "empty arguments": (said(""), said("{}"), NONE),
    "unknown tool renamed": (
        said('{"a": 1}', name="nope"),
        said('{"tool":"nope","error":"no such tool"}', name="invalid"),
        {"call_renamed": 1, "args_changed": 1},
    ),
    "arguments did not survive": (said('{"a": 1}'), said("[1]"), {"args_unparsed": 1}),
}


EDITS: dict[str, Row] = {
    "text joined with text after the calls": (
        said("{}", text="one"),
        said("{}", text="one  after "),
        {"text_changed": 1},
    ),
    "reasoning became text": (
        said("{}", reasoning_content="Hm."),
        said("{}", text="Hm.\nLook."),
        {"reasoning_dropped": 1, "text_changed": 1},
    ),
    "text replaced": (said("{}"), said("{}", text="[cleared]"), {"text_changed": 1}),
    "text dropped": (said("{}"), said("{}", text=None), {"text_dropped": 1}),
    "text added": (said("{}", text=None), said("{}", text="Look."), {"text_added": 1}),
}
"""More than payloads changed: the policy sees what the harness sent, on a path of its own."""

LATER: dict[str, Row] = {
    **EDITS,
    "arguments cleared": (said('{"a": "long"}'), said("{}"), {"args_changed": 1}),
    "one of two calls' arguments shortened": (
        said('{"a": "long"}', '{"a": "keep"}'),
        said('{"a": "[cleared]"}', '{"a": "keep"}'),
        {"args_changed": 1},
    ),
    "calls cleared": (said('{"a": "long"}'), {"role": "assistant", "content": "Look."}, {"call_dropped": 1}),
    "reasoning dropped": (said("{}", reasoning_content="Hm."), said("{}"), {"reasoning_dropped": 1}),
    "call renamed": (said("{}"), said("{}", name="other"), {"call_renamed": 1}),
}
"""Changes of a turn that had come back unchanged before."""


def use(arguments: Json, name: str = "Bash", call_id: str = "t0") -> Json:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def text(words: str, **more: Any) -> Json:
    return {"type": "text", "text": words, **more}


def thought(words: str, signature: str = "s") -> Json:
    return {"type": "thinking", "thinking": words, "signature": signature}


MESSAGES: dict[str, tuple[list[Json], list[Json], dict[str, int]]] = {
    "cache_control moves": (
        [text("Look."), use({})],
        [text("Look.", cache_control={"type": "ephemeral"}), use({})],
        NONE,
    ),
    "text after the call moved before": ([use({}), text("Look.")], [text("Look."), use({})], NONE),
    "empty text block": ([text(""), use({})], [use({})], NONE),
    "blank text block kept": ([text(" "), use({})], [text(" "), use({})], NONE),
    "calls reordered": (
        [use({"a": 1}), use({"a": 2}, call_id="t1")],
        [use({"a": 2}, call_id="t1"), use({"a": 1})],
        {"call_order": 1},
    ),
    "thinking with another signature": ([thought("Hm."), use({})], [thought("Hm.", ""), use({})], NONE),
    "thinking dropped": ([thought("Hm."), use({})], [use({})], {"reasoning_dropped": 1}),
    "arguments not an object": (
        [use({"a": 1})],
        [use({"__unparsedToolInput": {"raw": "x", "len": 1}})],
        {"args_changed": 1},
    ),
}


def item(kind: str, **fields: Any) -> Json:
    return {"type": kind, **fields}


FUNCTION = item("function_call", call_id="f0", name="bash", arguments='{"a": 1}')
WORDS = item("message", role="assistant", content=[{"type": "output_text", "text": "Look."}])
REASON = item("reasoning", id="r", summary=[{"type": "summary_text", "text": "Hm."}])
CUSTOM = item("custom_tool_call", call_id="f0", name="apply_patch", input="*** Begin Patch\n")
RESPONSES: dict[str, tuple[list[Json], list[Json], dict[str, int]]] = {
    "items kept": ([REASON, WORDS, FUNCTION], [REASON, WORDS, FUNCTION], NONE),
    "summary emptied": (
        [REASON, WORDS, FUNCTION],
        [{**REASON, "summary": []}, WORDS, FUNCTION],
        {"reasoning_dropped": 1},
    ),
    "reasoning dropped": ([REASON, FUNCTION], [FUNCTION], {"reasoning_dropped": 1}),
    "message without type": ([WORDS, FUNCTION], [{k: v for k, v in WORDS.items() if k != "type"}, FUNCTION], NONE),
    "custom tool call": ([WORDS, CUSTOM], [WORDS, CUSTOM], NONE),
}


async def replayed(path: Path, tokenizer: Any, route: str, *exchanges: tuple[Json, Any]) -> ReplayReport:
    lines = [
        {
            "seq": seq,
            "path": route,
            "headers": {},
            "request": {"model": "m", "max_tokens": 99, **request},
            "response": response,
        }
        for seq, (request, response) in enumerate(exchanges, start=1)
    ]
    trace = path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    return await replay(read_trace(trace), tokenizer, RoleMarkers(), {})


def check(report: ReplayReport, drift: dict[str, int], calls: int = 2) -> None:
    """One path of that many calls."""
    assert report.prefix_breaks == []
    assert report.drift == drift
    assert (report.calls, len(report.leaves), report.leaves[0].calls) == (calls, 1, calls)
    assert report.row_tokens_all_leaves == report.unique_tokens
    assert report.leaves[0].targets == report.targets


def chat_body(message: Json) -> Json:
    return {"choices": [{"message": message, "finish_reason": "stop"}]}


@pytest.mark.parametrize("row", CHAT)
async def test_chat_row(proxy_tokenizer: Any, tmp_path: Path, row: str) -> None:
    emitted, echoed, drift = CHAT[row]
    go = {"role": "user", "content": "go"}
    results = [{"role": "tool", "tool_call_id": c["id"], "content": "ok"} for c in emitted["tool_calls"]]
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
    first = {"messages": [go], "tools": tools}
    second = {"messages": [go, echoed, *results], "tools": tools}
    end = chat_body({"role": "assistant", "content": "Done."})
    exchanges = (first, chat_body(emitted)), (second, end)
    check(await replayed(tmp_path, proxy_tokenizer, "/v1/chat/completions", *exchanges), drift)


def conversation(*turns: Json) -> Json:
    """A Chat request with the results of all calls."""
    messages: list[Json] = [{"role": "user", "content": "go"}]
    for number, turn in enumerate(turns):
        # A turn whose calls were cleared still has their results.
        ids = [call["id"] for call in turn.get("tool_calls", [])] or [f"c{number}"]
        messages += [turn, *({"role": "tool", "tool_call_id": name, "content": "ok"} for name in ids)]
    return {"messages": messages, "tools": BASH}


@pytest.mark.parametrize("row", EDITS)
async def test_an_edited_first_echo_branches_and_is_counted_once(
    proxy_tokenizer: Any, tmp_path: Path, row: str
) -> None:
    emitted, edited, drift = EDITS[row]
    next_turn = said("{}", text="Next.")
    next_turn["tool_calls"][0]["id"] = "n0"
    report = await replayed(
        tmp_path,
        proxy_tokenizer,
        "/v1/chat/completions",
        (conversation(), chat_body(emitted)),
        (conversation(edited), chat_body(next_turn)),
        (conversation(edited, next_turn), chat_body({"role": "assistant", "content": "Done."})),
    )
    assert len(report.leaves) == 2
    assert report.row_tokens_all_leaves > report.unique_tokens
    assert report.drift == drift


@pytest.mark.parametrize("row", LATER)
async def test_a_later_edit_branches_and_is_counted_once(proxy_tokenizer: Any, tmp_path: Path, row: str) -> None:
    emitted, edited, drift = LATER[row]
    second, third = said("{}", text="Next."), said("{}", text="Third.")
    second["tool_calls"][0]["id"], third["tool_calls"][0]["id"] = "n0", "n1"
    report = await replayed(
        tmp_path,
        proxy_tokenizer,
        "/v1/chat/completions",
        (conversation(), chat_body(emitted)),
        (conversation(emitted), chat_body(second)),
        (conversation(edited, second), chat_body(third)),
        (conversation(edited, second, third), chat_body({"role": "assistant", "content": "Done."})),
    )
    assert len(report.leaves) == 2
    assert report.row_tokens_all_leaves > report.unique_tokens
    assert report.drift == drift


async def test_the_policy_sees_the_shorter_prompt_of_a_harness_that_clears_old_inputs(proxy_tokenizer: Any) -> None:
    """Only what was cleared is gone: text, thoughts and the payload beside it are as the policy wrote them."""
    tree = TrajectoryTree("e", ChatRenderer(proxy_tokenizer, "qwen3", thinking=False))
    user = Message(role="user", text="go")
    calls = [ToolCall(f"c{i}", "bash", {"command": f"{word} 1.0", "n": 1.0}) for i, word in enumerate(("BIG", "KEEP"))]
    turn = Message(role="assistant", text=" Look. ", tool_calls=tuple(calls))
    results = [Message(role="tool", text="ok", tool_call_id=call.id) for call in calls]
    # As JavaScript sends it back.
    echo = msgspec.structs.replace(
        turn,
        tool_calls=tuple(ToolCall(c.id, c.name, {**c.arguments, "n": 1}) for c in calls),  # type: ignore[dict-item]
    )
    cleared = msgspec.structs.replace(echo, tool_calls=(ToolCall("c0", "bash", {}), echo.tool_calls[1]))

    def ask(*messages: Message) -> PreparedCall:
        return tree.prepare(Conversation((user, *messages)), role=RoleClass.MAIN, agent_id="")

    def answer(prepared: PreparedCall, message: Message, call_id: str) -> None:
        ids = proxy_tokenizer.encode("said", add_special_tokens=False)
        sample = Sample(output_ids=ids, logprobs=[0.0] * len(ids), versions=[0] * len(ids), finish="stop")
        tree.commit(prepared, sample, message, call_id=call_id)

    answer(ask(), turn, "1")
    answer(ask(echo, *results), Message(role="assistant", text="Next."), "2")
    more = [Message(role="assistant", text="Next."), Message(role="user", text="go on")]
    prepared = ask(cleared, *results, *more)
    prompt = proxy_tokenizer.decode(prepared.input_ids)
    assert "BIG" not in prompt
    assert '{"command": "KEEP 1.0", "n": 1.0}' in prompt
    assert (prepared.drift, prepared.flags) == ({"args_changed": 1}, ["context_turn", "edited_turn"])
    answer(prepared, Message(role="assistant", text="Done."), "3")
    # Put back, the old path goes on.
    assert ask(echo, *results, *more).match.turn == "2"
    assert ask(cleared, *results, *more, Message(role="assistant", text="Done."), user).match.turn == "3"


@pytest.mark.parametrize("row", MESSAGES)
async def test_messages_row(proxy_tokenizer: Any, tmp_path: Path, row: str) -> None:
    emitted, echoed, drift = MESSAGES[row]
    go = {"role": "user", "content": "go"}
    results = [
        {"type": "tool_result", "tool_use_id": b["id"], "content": "ok"} for b in emitted if b["type"] == "tool_use"
    ]
    tools = [{"name": "Bash", "input_schema": {"type": "object"}}]
    # In completion order, the last first.
    history = [go, {"role": "assistant", "content": echoed}, {"role": "user", "content": results[::-1]}]
    exchanges = (
        ({"messages": [go], "tools": tools}, {"content": emitted}),
        ({"messages": history, "tools": tools}, {"content": [text("Done.")]}),
    )
    check(await replayed(tmp_path, proxy_tokenizer, "/v1/messages?beta=true", *exchanges), drift)


@pytest.mark.parametrize("row", RESPONSES)
async def test_responses_row(proxy_tokenizer: Any, tmp_path: Path, row: str) -> None:
    emitted, echoed, drift = RESPONSES[row]
    go = {"role": "user", "content": "go"}
    call = next(i for i in emitted if "call" in i["type"])
    result = item(f"{call['type']}_output", call_id="f0", output="ok")
    tools = [
        {"type": "function", "name": "bash", "parameters": {"type": "object"}},
        {"type": "custom", "name": "apply_patch"},
    ]
    exchanges = (
        ({"input": [go], "tools": tools}, {"output": emitted}),
        ({"input": [go, *echoed, result], "tools": tools}, {"output": [WORDS]}),
    )
    check(await replayed(tmp_path, proxy_tokenizer, "/v1/responses", *exchanges), drift)


GO = {"role": "user", "content": "go"}
BASH = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
AGAIN: dict[str, tuple[Json, Json]] = {
    "cut answer, sent again with a larger bound": (said("{}"), {"messages": [GO], "max_tokens": 64_000}),
    "no call, response not kept": (
        {"role": "assistant", "content": "No call."},
        {"messages": [GO, {"role": "user", "content": "No tool calls found in the response."}]},
    ),
    "unknown tool, response not kept": (
        said("{}", name="nope"),
        {"messages": [GO, {"role": "user", "content": "Tool call error: unknown tool"}]},
    ),
    "empty response": (
        {"role": "assistant", "content": ""},
        {"messages": [{"role": "user", "content": "go\n[Your previous response had no visible output]"}]},
    ),
}
"""What the policy said, and the next request of a harness that took it out of its history."""


@pytest.mark.parametrize("row", AGAIN)
async def test_a_turn_that_the_harness_discards_keeps_its_own_leaf(
    proxy_tokenizer: Any, tmp_path: Path, row: str
) -> None:
    emitted, request = AGAIN[row]
    exchanges = (
        ({"messages": [GO], "tools": BASH}, chat_body(emitted)),
        ({"tools": BASH, **request}, chat_body({"role": "assistant", "content": "Done."})),
    )
    report = await replayed(tmp_path, proxy_tokenizer, "/v1/chat/completions", *exchanges)
    assert [leaf.calls for leaf in report.leaves] == [1, 1]
    assert sum(leaf.targets for leaf in report.leaves) == report.targets
    assert (report.calls, report.orphans, report.retries_replayed, report.prefix_breaks) == (2, 0, 0, [])


async def test_T04_calls_cleared_from_the_echo_are_found_by_their_results(proxy_tokenizer: Any, tmp_path: Path) -> None:
    emitted, echoed = said('{"a": 1}'), {"role": "assistant", "content": "Look."}
    result = {"role": "tool", "tool_call_id": "c0", "content": "ok"}
    exchanges = (
        ({"messages": [GO], "tools": BASH}, chat_body(emitted)),
        ({"messages": [GO, echoed, result], "tools": BASH}, chat_body({"role": "assistant", "content": "Done."})),
    )
    check(await replayed(tmp_path, proxy_tokenizer, "/v1/chat/completions", *exchanges), {"call_dropped": 1})


async def test_two_calls_under_one_recorded_id_are_two_calls(proxy_tokenizer: Any, tmp_path: Path) -> None:
    """The proxy issues ids of its own, so harnesses that drop a second call with a known id keep both."""
    twice = said('{"a": 1}', '{"a": 2}')
    for call in twice["tool_calls"]:
        call["id"] = "same"
    results = [{"role": "tool", "tool_call_id": "same", "content": words} for words in ("one", "two")]
    exchanges = (
        ({"messages": [GO], "tools": BASH}, chat_body(twice)),
        ({"messages": [GO, twice, *results], "tools": BASH}, chat_body({"role": "assistant", "content": "Done."})),
    )
    check(await replayed(tmp_path, proxy_tokenizer, "/v1/chat/completions", *exchanges), NONE)


CONTEXT: dict[str, tuple[Json, Json, int]] = {
    "cache_control moves on, its block becomes a string": (
        {"messages": [{"role": "user", "content": [text("go", cache_control={"type": "ephemeral"})]}]},
        {"messages": [{"role": "user", "content": "go"}]},
        1,
    ),
    "billing block changes": (
        {"system": [text("x-anthropic-billing-header: cch=1;"), text("Work.")], "messages": [GO]},
        {"system": [text("x-anthropic-billing-header: cch=2;"), text("Work.")], "messages": [GO]},
        1,
    ),
    "blanks around a user's text": ({"messages": [GO]}, {"messages": [{"role": "user", "content": " go\n"}]}, 1),
    "another user's text": ({"messages": [GO]}, {"messages": [{"role": "user", "content": "stop"}]}, 2),
}
"""The first request, its beginning as the second request repeats it, and main leaves that follow."""


@pytest.mark.parametrize("row", CONTEXT)
async def test_context_changes_between_requests(proxy_tokenizer: Any, tmp_path: Path, row: str) -> None:
    first, again, leaves = CONTEXT[row]
    tools = [{"name": "Bash", "input_schema": {"type": "object"}}]
    turn = {"role": "assistant", "content": [text("Look."), use({})]}
    result = {"type": "tool_result", "tool_use_id": "t0", "content": "ok"}
    rest = [turn, {"role": "user", "content": [result]}, {"role": "system", "content": "A nag from the harness."}]
    exchanges = (
        ({**first, "tools": tools}, {"content": turn["content"]}),
        ({**again, "messages": [*again["messages"], *rest], "tools": tools}, {"content": [text("Done.")]}),
    )
    report = await replayed(tmp_path, proxy_tokenizer, "/v1/messages", *exchanges)
    assert report.prefix_breaks == []
    assert len(report.leaves) == leaves
    assert (report.row_tokens_all_leaves == report.unique_tokens) == (leaves == 1)


async def test_a_growing_tools_array_begins_a_new_path_and_trains_the_old_turn_once(
    proxy_tokenizer: Any, tmp_path: Path
) -> None:
    turn = {"role": "assistant", "content": [text("Look."), use({})]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t0", "content": "ok"}]}
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in ("Bash", "WebFetch")]
    exchanges = (
        ({"messages": [GO], "tools": tools[:1]}, {"content": turn["content"]}),
        ({"messages": [GO, turn, result], "tools": tools}, {"content": [text("Done.")]}),
    )
    report = await replayed(tmp_path, proxy_tokenizer, "/v1/messages", *exchanges)
    assert [leaf.calls for leaf in report.leaves] == [1, 1]
    assert sum(leaf.targets for leaf in report.leaves) == report.targets
    assert report.prefix_breaks == []
