"""Compaction by unmodified harnesses: the request, its summary, and how the run goes on from it.

The tokenizer of these tests has one token per byte, so sizes are bytes of text.
"""

from pathlib import Path
from typing import Any

import pytest
from harness_runs import OPENCODE, PI, Rules, chain, installed, leaves, roles, run, shell
from proxy_app import App

pytestmark = pytest.mark.harness

SUMMARY = "<analysis>\nI looked.\n</analysis>\n<summary>\nSome steps are done. SUMMARY-END\n</summary>"
SNAPSHOT = "<state_snapshot>Some steps are done. SUMMARY-END</state_snapshot>"


def rounds(name: str, sizes: list[int]) -> Rules:
    """One command after the other, each with an output of that many bytes; a summary when asked for one."""
    rules: Rules = {
        "CRITICAL: Respond with TEXT ONLY": SUMMARY,
        "You are performing a CONTEXT CHECKPOINT COMPACTION": SUMMARY,
        "First, reason in your scratchpad": SNAPSHOT,
        "<conversation>": SUMMARY,
        "after-ok": "All is done.",
    }
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


async def test_claude_compacts_when_its_window_is_nearly_full(proxy_tokenizer: Any, tmp_path: Path) -> None:
    env = {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000", "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "20"}
    profile = installed("claude_code", env=env)
    app = await run(proxy_tokenizer, profile, tmp_path, rounds("claude_code", [6000, 8000, 100]))
    assert check_two_parts(app) == (3, 1)
    # The newest turn came back verbatim behind the summary: context there, a target where it was sampled.
    assert app.sink.records[-1].flags == ["context_turn"]


@pytest.mark.parametrize(("name", "max_context"), [("claude_code", 16_500), ("claude_code_328", 89_300)])
async def test_claude_compacts_when_the_policy_cannot_hold_the_prompt(
    proxy_tokenizer: Any, tmp_path: Path, name: str, max_context: int
) -> None:
    app = await run(proxy_tokenizer, installed(name), tmp_path, rounds(name, [5000, 9000]), max_context=max_context)
    assert check_two_parts(app) == (2, 1)
    assert app.sink.records[-1].flags == ["context_turn"]


@pytest.mark.parametrize("name", PI)
async def test_pi_compacts_when_the_policy_cannot_hold_the_prompt(
    proxy_tokenizer: Any, tmp_path: Path, name: str
) -> None:
    settings = '{"compaction": {"enabled": true, "reserveTokens": 1000, "keepRecentTokens": 500}}'
    profile = installed(name, files={".pi/agent/settings.json": settings})
    app = await run(proxy_tokenizer, profile, tmp_path, rounds(name, [7000, 7000]), max_context=18_000)
    assert check_two_parts(app) == (2, 2)


async def test_codex_compacts_at_its_limit_and_keeps_only_user_messages(proxy_tokenizer: Any, tmp_path: Path) -> None:
    config = installed("codex").files[".codex/config.toml"]
    limits = "model_context_window = 100000\nmodel_auto_compact_token_limit = 52000\n"
    profile = installed("codex", files={".codex/config.toml": limits + config})
    app = await run(proxy_tokenizer, profile, tmp_path, rounds("codex", [9000, 9000, 100]))
    assert check_two_parts(app) == (3, 2)


@pytest.mark.parametrize("name", OPENCODE)
async def test_opencode_compacts_at_its_limit(proxy_tokenizer: Any, tmp_path: Path, name: str) -> None:
    path = ".config/opencode/opencode.json"
    profile = installed(name, files={path: installed(name).files[path].replace("128000", "60000")})
    app = await run(proxy_tokenizer, profile, tmp_path, rounds(name, [12_000, 12_000, 100]))
    assert check_two_parts(app) == (3, 2)


@pytest.mark.parametrize("name", OPENCODE)
async def test_opencode_compacts_when_the_policy_cannot_hold_the_prompt(
    proxy_tokenizer: Any, tmp_path: Path, name: str
) -> None:
    # It goes on to the end, and yet its exit code tells of the error on the way.
    sizes = rounds(name, [5000, 9000])
    app = await run(proxy_tokenizer, installed(name), tmp_path, sizes, code=1, max_context=43_700)
    assert check_two_parts(app) == (2, 2)


async def test_qwen_compacts_the_head_of_its_history(proxy_tokenizer: Any, tmp_path: Path) -> None:
    path = ".qwen/settings.json"
    limits = '{"model": {"chatCompression": {"contextPercentageThreshold": 0.5},'
    limits += ' "generationConfig": {"contextWindowSize": 150000}},'
    settings = installed("qwen_code").files[path].strip()
    profile = installed("qwen_code", files={path: limits + settings.removeprefix("{")})
    # Of more than 4 KiB its terminal loses a part now and then.
    app = await run(proxy_tokenizer, profile, tmp_path, rounds("qwen_code", [3900, 3900, 3900, 100]))
    assert check_two_parts(app) == (4, 1)
