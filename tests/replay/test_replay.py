"""Replay of recorded traffic: a trace of our own for the rules, the shared recordings for reality."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gyre.core.errors import ConfigError
from gyre.harnesses import load_profile
from gyre.replay.replay import ReplayReport, replay, replay_file
from gyre.replay.traces import read_answer, read_trace
from gyre.trajectory.roles import RoleMarkers

SHARED = Path(__file__).parents[3] / "shared" / "traces"
TOOL = {"name": "Bash", "description": "d", "input_schema": {"type": "object"}}

PROFILES = {"claude": "claude_code", "mini": "mini_swe_agent", "qwen": "qwen_code"}
PROFILES |= {"oca": "opencode", "ocr": "opencode", "pir": "pi"}


def message_events(text: str, *blocks: dict[str, Any], end: bool = True) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [{"type": "message_start", "message": {"id": "m"}}]
    for index, block in enumerate([{"type": "text", "text": text}, *blocks]):
        begun = {**block, "text": ""} if block["type"] == "text" else {**block, "input": {}}
        events.append({"type": "content_block_start", "index": index, "content_block": begun})
        part = {"text": text} if block["type"] == "text" else {"partial_json": json.dumps(block["input"])}
        events.append({"type": "content_block_delta", "index": index, "delta": part})
        if end:
            events.append({"type": "content_block_stop", "index": index})
    return [*events, {"type": "message_stop"}] if end else [*events, {"_drop": "abort"}]


def line(seq: int, messages: list[Any], response: Any, **more: Any) -> str:
    tools = [TOOL] if seq == 1 else "…[same 1 tools as seq 1]"
    request = {"model": "m", "max_tokens": 99, "stream": True, "messages": messages, "tools": tools}
    return json.dumps(
        {"seq": seq, "t": 1.0, "method": "POST", "path": "/v1/messages?beta=true", "headers": {}, "request": request,
         "response": response, **more}
    )  # fmt: skip


def own_trace() -> str:
    """First answer is cut and sampled anew, a 500 in between, the tool turn comes back rewritten, a marked retry
    replays."""
    use = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls", "timeout": 10000.0}}
    echoed = {**use, "input": {"timeout": 10000, "command": "ls"}}
    first = [{"role": "user", "content": "go"}]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.txt"}
    second = [*first, {"role": "assistant", "content": [{"type": "text", "text": "Look. "}, echoed]},
              {"role": "user", "content": [result]}]  # fmt: skip
    final = message_events("Done.")
    return "\n".join(
        [
            line(1, first, message_events("Loo", end=False)),
            line(2, first, message_events("Look.", use)),
            line(3, second, {"_status": 500, "_headers": {}, "body": {}}),
            line(4, second, final),
            line(5, second, final, headers={"x-stainless-retry-count": "1"}),
        ]
    )


async def test_own_trace_replays_by_the_rules(proxy_tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(own_trace())
    report = await replay(read_trace(path), proxy_tokenizer, RoleMarkers(), {})
    assert (report.calls, report.orphans, report.nodes) == (2, 1, 3)
    assert (report.retries_replayed, report.retries_attached) == (1, 0)
    assert report.prefix_breaks == []
    # Text is stripped before it is emitted, so the echo's trailing blank is a difference; so is the rewritten number.
    assert report.drift == {"text_whitespace": 1, "args_form": 1}
    (leaf,) = report.leaves
    call = '\n<tool_call>\n{"name": "Bash", "arguments": {"command": "ls", "timeout": 10000.0}}\n</tool_call>'
    sampled = len(proxy_tokenizer.encode("Look." + call)) + len("Done.") + 2
    assert (leaf.role, leaf.targets, report.targets) == ("main", sampled, sampled)
    assert report.unique_tokens == report.row_tokens_all_leaves + len("Loo")


def test_replay_file_reports_what_is_wrong(proxy_tokenizer: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(own_trace())
    proxy_tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert replay_file(trace, "claude_code", str(tmp_path / "tokenizer")).calls == 2
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        replay_file(trace, "claude_code", str(tmp_path))
    for text, words in (
        ("{}", r"trace\.jsonl:1 is not"),
        (own_trace().replace("/v1/messages", "/v1/files"), "no route"),
        (own_trace().replace('"delta"', '"part"'), r"trace\.jsonl:1 has .* an answer .* anthropic .*delta"),
        (own_trace().replace("as seq 1", "as seq 7"), r"trace\.jsonl:2 has tools .*7"),
        (own_trace().replace('"toolu_1"', '["toolu_1"]'), r"trace\.jsonl:2 has .* an answer .*calls\[0\]\.id"),
        ("[" * 5000, r"trace\.jsonl:1 is not"),
    ):
        trace.write_text(text)
        with pytest.raises(ConfigError, match=words):
            replay_file(trace, "claude_code", str(tmp_path / "tokenizer"))
    deep = '{"a": ' * 700 + "1" + "}" * 700
    for place, words in (("7", r"Exchange 1 .*content"), (deep, r"Exchange 1 .*recursion")):
        trace.write_text(own_trace().replace('"content": "go"', f'"content": {place}'))
        with pytest.raises(ConfigError, match=words):
            replay_file(trace, "claude_code", str(tmp_path / "tokenizer"))


def test_custom_tool_calls_are_read_from_streams_and_bodies() -> None:
    patch = "*** Begin Patch\n"
    item = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": patch}
    done = {"type": "response.output_item.done", "item": item}
    for response in ({"output": [item]}, [done, {"type": "response.completed"}], [done, {"_drop": "cut"}]):
        answer = read_answer("responses", response)
        assert answer is not None
        assert answer.complete
        (call,) = answer.calls
        assert (call.id, call.name, json.loads(call.arguments)) == ("c", "apply_patch", {"input": patch})


async def replayed(name: str, tokenizer: Any) -> ReplayReport:
    path = SHARED / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not on this machine")
    family = name.removeprefix("probe_").partition("_")[0].rstrip("0123456789")
    profile = load_profile(PROFILES.get(family, family))
    return await replay(read_trace(path), tokenizer, profile.markers, profile.canned_answers)


COMPACTION = "the harness replaced its history by a summary"
DISCARDED = "the harness took an answer out of its history"
SCRIPTED = (
    "the scripted server gave answers that this proxy never gives: one id for two calls, arguments not JSON, "
    "text behind a call"
)
FORKS = {
    "claude220_b_compact_ptl": (2, COMPACTION),
    "claude220_b_compact_win100": (2, COMPACTION),
    "claude328_b_compact_win100": (2, COMPACTION),
    "claude328_b_compact_win100pct": (2, COMPACTION),
    "pi_chat_f_400": (2, COMPACTION),
    "claude220_c_empty": (2, DISCARDED),
    "probe_mini": (3, DISCARDED),
    "mini_mutations": (3, DISCARDED),
    "qwen_mutations": (5, DISCARDED),
    "claude220_mutations": (3, SCRIPTED),
    "codex_mutations": (3, SCRIPTED),
    "opencode_anthropic_mutations": (3, SCRIPTED),
    "opencode_chat_mutations": (3, SCRIPTED),
    "pi_chat_mutations": (3, SCRIPTED),
}
"""Shared trace → main leaves, and why it is not one."""


async def test_T01_every_shared_trace_keeps_its_tokens_and_forks_for_a_cause(proxy_tokenizer: Any) -> None:
    """No call that continues a recorded one loses that one's tokens, whatever the harness did to its history."""
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is not on this machine")
    for path in sorted(SHARED.glob("*.jsonl")):
        report = await replayed(path.stem, proxy_tokenizer)
        assert report.prefix_breaks == [], path.stem
        assert report.nodes == report.calls + report.orphans, path.stem
        main = sum(leaf.role == "main" for leaf in report.leaves)
        assert main == FORKS.get(path.stem, (1, ""))[0], path.stem


@pytest.mark.parametrize(
    ("name", "leaves"),
    [
        ("claude220_a_toolloop", {"main": 1}),
        ("claude220_b_subagents", {"main": 1, "sub-agent": 2}),
        ("claude220_b_compact_win100", {"main": 2, "main-summary": 1}),
        ("claude220_b_compact_ptl", {"main": 2, "main-summary": 1}),
        ("claude328_b_subagents", {"main": 1, "sub-agent": 2}),
        ("codex_subagents", {"main": 1, "sub-agent": 2}),
        ("opencode_chat_subagents", {"main": 1, "sub-agent": 2}),
        ("opencode_chat_f_drop", {"main": 1}),
        ("pi_chat_f_400", {"main": 2, "main-summary": 1}),
    ],
)
async def test_T13_leaves_of_sub_agents_and_compaction(proxy_tokenizer: Any, name: str, leaves: dict[str, int]) -> None:
    report = await replayed(name, proxy_tokenizer)
    assert Counter(leaf.role.value for leaf in report.leaves) == leaves


async def test_T01_a_tool_loop_is_one_row_of_unique_tokens(proxy_tokenizer: Any) -> None:
    for name in ("claude220_a_toolloop", "claude328_a_toolloop", "codex_f_500", "pi_chat_f_slow", "qwen_f_500"):
        report = await replayed(name, proxy_tokenizer)
        assert len(report.leaves) == 1
        assert report.row_tokens_all_leaves == report.unique_tokens, name
        assert report.leaves[0].targets == report.targets
