"""Compaction by unmodified harnesses: the request, its summary, and how the run goes on from it.

The tokenizer of these tests has one token per byte, so sizes are bytes of text.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness_runs import (
    EVERY,
    OPENCODE,
    PI,
    Refusals,
    Rules,
    chain,
    harness,
    installed,
    leaves,
    proxy_for,
    roles,
    run,
    shell,
)
from proxy_app import App
from test_harness_agents import agent, wait_for_agents, with_agents

from gyre.core.records import RoleClass

pytestmark = pytest.mark.harness

SUMMARY = "<analysis>\nI looked.\n</analysis>\n<summary>\nSome steps are done. SUMMARY-END\n</summary>"
SUMMARIES = {
    "CRITICAL: Respond with TEXT ONLY": SUMMARY,
    "You are performing a CONTEXT CHECKPOINT COMPACTION": SUMMARY,
    "First, reason in your scratchpad": "<state_snapshot>Some steps are done. SUMMARY-END</state_snapshot>",
    "<conversation>": SUMMARY,
}


def rounds(name: str, sizes: list[int]) -> Rules:
    """One command after the other, each with an output of that many bytes; a summary when asked for one."""
    rules: Rules = {**SUMMARIES, "after-ok": "All is done."}
    outputs = [
        shell(name, f"printf 'r{i}%s\\n' -ok; yes 'Some line of about forty characters.' | head -c {size}")
        for i, size in enumerate(sizes)
    ]
    for number in range(len(sizes) - 1, 0, -1):
        following = outputs[number + 1] if number + 1 < len(sizes) else ""
        rules[f"r{number}-ok"] = f"Step {number + 1}.\n{following}" if following else "All is done."
    rules["r0-ok"] = "Step 1.\n" + outputs[1]
    # Harnesses that keep no tail go on from the summary alone.
    rules["SUMMARY-END"] = rules["Continue if you have next steps"] = "After.\n" + shell(name, "printf 'after%s' -ok")
    rules["Do the steps."] = "Step 0.\n" + outputs[0]
    # Claude Code 2.1.328 repeats its reminders behind the tail.
    rules["<system-reminder>"] = "All is done."
    return rules


def check_two_parts(app: App) -> tuple[int, int]:
    """The main path before and after one summary; returns the calls of the two parts. Nothing else is a leaf."""
    records = app.sink.records
    assert roles(app)["main-summary"] == 1
    assert leaves(app) == {"main": 2, "main-summary": 1}
    at = next(i for i, record in enumerate(records) if record.role == "main-summary")
    chain(app, records[:at])
    chain(app, records[at + 1 :])
    return at, len(records) - at - 1


TOLD = 2**20
"""A window that the harness takes for the policy's, so that it does not compact before an error tells it to."""


@dataclass(frozen=True)
class Filling:
    """How a harness fills a window of that many tokens: sizes of the commands' outputs, and calls of the two parts."""

    window: int
    sizes: list[int]
    calls: tuple[int, int]
    tail: bool = False
    """The newest turn comes back verbatim behind the summary: context there, a target where it was sampled."""


FILLINGS = {
    "claude_code": Filling(33_500, [6000, 8000, 100], (3, 1), tail=True),
    "claude_code_328": Filling(110_000, [9000, 9000, 100], (3, 1), tail=True),
    "codex": Filling(70_000, [9000, 9000, 100], (3, 2)),
    "opencode": Filling(70_000, [12_000, 12_000, 100], (3, 2)),
    "opencode_messages": Filling(70_000, [12_000, 12_000, 100], (3, 2)),
    "opencode_responses": Filling(70_000, [12_000, 12_000, 100], (3, 2)),
    # Of more than 4 KiB its terminal loses a part now and then.
    "qwen_code": Filling(107_000, [3900, 3900, 3900, 100], (4, 1)),
}


@pytest.mark.parametrize("name", FILLINGS)
async def test_T13_compaction_follows_the_window_of_the_policy(proxy_tokenizer: Any, tmp_path: Path, name: str) -> None:
    """Told the policy's window, the harness compacts before it overflows: no call is ever refused."""
    filling = FILLINGS[name]
    refused = Refusals()
    app = await run(
        proxy_tokenizer,
        installed(name),
        tmp_path,
        rounds(name, filling.sizes),
        max_context=filling.window,
        wrap=refused.around,
    )
    assert refused.statuses == []
    assert check_two_parts(app) == filling.calls
    assert (app.sink.records[-1].flags == ["context_turn"]) == filling.tail


NESTED = {
    "claude_code": Filling(40_000, [6000, 8000, 100], (3, 1)),
    "claude_code_328": Filling(110_000, [9000, 9000, 9000, 9000, 100], (5, 1)),
    "codex": Filling(62_000, [9000, 9000, 9000, 100], (3, 2)),
    "opencode": Filling(62_000, [12_000, 12_000, 100], (3, 2)),
    "opencode_messages": Filling(62_000, [12_000, 12_000, 100], (3, 2)),
    "opencode_responses": Filling(62_000, [12_000, 12_000, 100], (3, 2)),
    "qwen_code": Filling(100_000, [3900] * 8, (8, 1)),
}
"""As FILLINGS, for a sub-agent."""


@pytest.mark.parametrize("name", NESTED)
async def test_T13_compaction_inside_a_sub_agent(proxy_tokenizer: Any, tmp_path: Path, name: str) -> None:
    """Its request for a summary is a leaf of its own class, and belongs to the sub-agent whatever ids it bears."""
    filling = NESTED[name]
    rules = rounds(name, filling.sizes)
    task = rules.pop("Do the steps.")
    summaries = {marker: rules.pop(marker) for marker in SUMMARIES}
    del rules["<system-reminder>"]
    steps = {marker: "Result of A." if text == "All is done." else text for marker, text in rules.items()}
    rules = {**summaries, "Result of A.": "All is done.", **steps, "SUBTASK-A": task, "Do the steps.": agent(name, "A")}
    if name == "codex":
        rules = {**summaries, "agent_id": wait_for_agents, **rules, "Result of A.": wait_for_agents}
    rules["<system-reminder>"] = "Result of A."
    app = await run(proxy_tokenizer, with_agents(name), tmp_path, rules, max_context=filling.window)
    (agent_id,) = {record.agent_id for record in app.sink.records} - {""}
    own = [record for record in app.sink.records if record.agent_id == agent_id]
    at = next(i for i, record in enumerate(own) if record.role == "sub-agent-summary")
    assert (at, len(own) - at - 1) == filling.calls
    chain(app, own[:at], RoleClass.SUB_AGENT)
    chain(app, own[at + 1 :], RoleClass.SUB_AGENT)
    assert leaves(app) == {"main": 1, "sub-agent": 2, "sub-agent-summary": 1}


@pytest.mark.parametrize("name", PI)
async def test_T13_pi_compacts_between_two_prompts(proxy_tokenizer: Any, tmp_path: Path, name: str) -> None:
    refused = Refusals()
    rules: Rules = {"More of it.": "More is done.", **rounds(name, [7000, 7000])}
    profile = installed(name, argv=["More of it."])
    app = await run(proxy_tokenizer, profile, tmp_path, rules, max_context=26_000, wrap=refused.around)
    assert refused.statuses == []
    assert check_two_parts(app) == (3, 1)
    assert app.sink.records[-1].flags == ["context_turn"]


@pytest.mark.parametrize(("name", "max_context"), [("claude_code", 16_500), ("claude_code_328", 89_300)])
async def test_claude_compacts_when_the_policy_cannot_hold_the_prompt(
    proxy_tokenizer: Any, tmp_path: Path, name: str, max_context: int
) -> None:
    app = await run(
        proxy_tokenizer, installed(name), tmp_path, rounds(name, [5000, 9000]), max_context=max_context, window=TOLD
    )
    assert check_two_parts(app) == (2, 1)
    assert app.sink.records[-1].flags == ["context_turn"]


@pytest.mark.parametrize("name", PI)
async def test_pi_compacts_when_the_policy_cannot_hold_the_prompt(
    proxy_tokenizer: Any, tmp_path: Path, name: str
) -> None:
    settings = '{"compaction": {"enabled": true, "reserveTokens": 1000, "keepRecentTokens": 500}}'
    profile = installed(name, files={".pi/agent/settings.json": settings})
    app = await run(proxy_tokenizer, profile, tmp_path, rounds(name, [7000, 7000]), max_context=18_000, window=TOLD)
    assert check_two_parts(app) == (2, 2)


@pytest.mark.parametrize("name", OPENCODE)
async def test_opencode_compacts_when_the_policy_cannot_hold_the_prompt(
    proxy_tokenizer: Any, tmp_path: Path, name: str
) -> None:
    # It goes on to the end, and yet its exit code tells of the error on the way.
    sizes = rounds(name, [5000, 9000])
    app = await run(proxy_tokenizer, installed(name), tmp_path, sizes, code=1, max_context=43_700, window=TOLD)
    assert check_two_parts(app) == (2, 2)


async def test_qwen_compacts_when_the_policy_cannot_hold_the_prompt(proxy_tokenizer: Any, tmp_path: Path) -> None:
    """It goes on from an assistant message of its own and later merges that with the policy's answer: the answer keeps
    a leaf, and the path goes on from a copy as context."""
    rules = rounds("qwen_code", [3900, 3900, 3900, 100])
    app = await run(proxy_tokenizer, installed("qwen_code"), tmp_path, rules, max_context=72_000, window=TOLD)
    records = app.sink.records
    assert [str(record.role) for record in records] == ["main", "main", "main-summary", "main", "main"]
    assert leaves(app) == {"main": 3, "main-summary": 1}
    chain(app, records[:2])
    assert records[-1].flags == ["context_turn"]


@pytest.mark.parametrize(("name", "code"), [(name, int(name != "qwen_code" and name not in PI)) for name in EVERY])
async def test_a_prompt_that_never_fits_ends_the_run(
    proxy_tokenizer: Any, tmp_path: Path, name: str, code: int
) -> None:
    """Nothing was sampled. Where the exit code tells of it, the profile knows the words: the policy's context was too
    small, which is no outage."""
    profile, refused = installed(name), Refusals()
    async with (
        proxy_for(proxy_tokenizer, profile, {}, max_context=600, wrap=refused.around) as app,
        harness(profile, app, tmp_path, "Do the steps.", TOLD) as running,
    ):
        ended, output = await running.end()
    assert (ended, app.sink.records) == (code, [])
    assert set(refused.statuses) == {400}
    assert any(words in output for words in profile.policy_failures) == bool(code)
