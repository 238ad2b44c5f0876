"""Sub-agents of unmodified harnesses: who called, and which tokens belong to whom."""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness_runs import CLAUDE, OPENCODE, Rules, call, chain, installed, leaves, roles, run, shell
from proxy_app import App

from gyre.core.records import CallRecord, RoleClass
from gyre.harnesses import HarnessProfile

pytestmark = pytest.mark.harness


TOOLS = {
    "codex": "spawn_agent",
    "qwen_code": "agent",
    **dict.fromkeys(OPENCODE, "task"),
    **dict.fromkeys(CLAUDE, "Agent"),
}
"""Each harness's own tool for sub-agents."""


def agent(name: str, task: str, kind: str = "") -> str:
    """A call of that tool."""
    if name == "codex":
        return call("spawn_agent", message=f"SUBTASK-{task}: go")
    kind = kind or ("general" if name in OPENCODE else "general-purpose")
    return call(TOOLS[name], description=f"do {task}", prompt=f"SUBTASK-{task}: go", subagent_type=kind)


def with_agents(name: str, **changes: dict[str, str]) -> HarnessProfile:
    """The installed harness with its tool for sub-agents: the smallest prompt of Claude Code offers none, this one is
    nearly as small."""
    profile = installed(name, **changes)
    if name != "claude_code":
        return profile
    argv = [text.replace("Bash,Read,Edit", "Bash,Agent") for text in profile.argv if text != "--bare"]
    return msgspec.structs.replace(profile, argv=[*argv, "--setting-sources", "", "--strict-mcp-config"])


def work(name: str) -> Rules:
    """Two sub-agents at once; each runs one command and reports."""
    return {
        "Result of": "All is done.",
        "a-ok": "Result of A.",
        "b-ok": "Result of B.",
        "SUBTASK-A": "sub A\n" + shell(name, "printf 'a%s' -ok"),
        "SUBTASK-B": "sub B\n" + shell(name, "printf 'b%s' -ok"),
        "Do the steps.": "Two helpers.\n" + agent(name, "A") + "\n" + agent(name, "B"),
    }


def wait_for_agents(prompt: str) -> str:
    """What the main agent says in Codex when it has sub-agents: it waits for all of them once, then it ends."""
    if '{"name": "wait_agent"' in prompt.rsplit("Do the steps.", 1)[-1]:
        return "All is done."
    ids = re.findall(r'"agent_id":"([^"]+)"', prompt)
    return "\n".join(call("wait_agent", targets=[target], timeout_ms=60_000) for target in ids)


def by_agent(app: App) -> dict[str, list[CallRecord]]:
    found = defaultdict[str, list[CallRecord]](list)
    for record in app.sink.records:
        found[record.agent_id].append(record)
    return found


def offered_to_sub_agents(app: App, name: str) -> bool:
    """Whether sub-agents may have sub-agents."""
    (offered,) = {f'"name": "{TOOLS[name]}"' in text for text in app.script.prompts if "Do the steps." not in text}
    return offered


def check_agents(app: App, main: int, agents: list[int]) -> None:
    """Calls of the main agent and of each sub-agent; each has one exact path and one leaf."""
    found = by_agent(app)
    chain(app, found.pop(""))
    for records in found.values():
        chain(app, records, RoleClass.SUB_AGENT)
    assert sorted(len(records) for records in found.values()) == agents
    assert roles(app) == {"main": main, "sub-agent": sum(agents)}
    assert leaves(app) == {"main": 1, "sub-agent": len(agents)}


@pytest.mark.parametrize("name", ["claude_code", "claude_code_328", "qwen_code", *OPENCODE])
async def test_two_blocking_sub_agents(proxy_tokenizer: Any, tmp_path: Path, name: str) -> None:
    app = await run(proxy_tokenizer, with_agents(name), tmp_path, work(name))
    check_agents(app, 2, [2, 2])
    assert offered_to_sub_agents(app, name) == (name in CLAUDE)


async def test_codex_sub_agents_run_beside_their_parent(proxy_tokenizer: Any, tmp_path: Path) -> None:
    rules = {"agent_id": wait_for_agents, **work("codex"), "Result of": wait_for_agents}
    app = await run(proxy_tokenizer, installed("codex"), tmp_path, rules)
    found = by_agent(app)
    check_agents(app, len(found[""]), [2, 2])
    assert len(found[""]) >= 3
    assert not offered_to_sub_agents(app, "codex")


async def test_codex_sub_agent_with_its_parents_context(proxy_tokenizer: Any, tmp_path: Path) -> None:
    """It gets the user's messages and tools of its own, not the parent's turns: a path of its own."""
    rules: Rules = {
        "agent_id": wait_for_agents,
        "Result of": wait_for_agents,
        "a-ok": "Result of A.",
        "SUBTASK-A": shell("codex", "printf 'a%s' -ok"),
        "one-ok": call("spawn_agent", message="SUBTASK-A: go", fork_context=True),
        "Do the steps.": shell("codex", "printf 'one%s' -ok"),
    }
    app = await run(proxy_tokenizer, installed("codex"), tmp_path, rules)
    check_agents(app, len(by_agent(app)[""]), [2])


@pytest.mark.parametrize("name", CLAUDE)
async def test_claude_sub_agent_of_a_sub_agent(proxy_tokenizer: Any, tmp_path: Path, name: str) -> None:
    rules: Rules = {
        "Result of N": "Result of A.",
        "Result of A": "All is done.",
        "n-ok": "Result of N.",
        "SUBTASK-N": shell(name, "printf 'n%s' -ok"),
        "SUBTASK-A": "Somebody else.\n" + agent(name, "N"),
        "Do the steps.": agent(name, "A"),
    }
    check_agents(await run(proxy_tokenizer, with_agents(name), tmp_path, rules), 2, [2, 2])


@pytest.mark.parametrize("name", CLAUDE)
async def test_claude_background_sub_agents_report_in_later_turns(
    proxy_tokenizer: Any, tmp_path: Path, name: str
) -> None:
    profile = with_agents(name, env={"CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "0"})
    rules: Rules = {"Async agent launched": "They work.", **work(name), "Result of": "Noted."}
    app = await run(proxy_tokenizer, profile, tmp_path, rules)
    main = len(by_agent(app)[""])
    assert main in (3, 4), "one turn to start them, one after, one or two notifications"
    check_agents(app, main, [2, 2])


async def test_claude_forks_branch_inside_the_turn_that_made_them(proxy_tokenizer: Any, tmp_path: Path) -> None:
    name = "claude_code_328"
    rules: Rules = {
        "Result of": "All is done.",
        "a-ok": "Result of A.",
        "b-ok": "Result of B.",
        "SUBTASK-A": shell(name, "printf 'a%s' -ok"),
        "SUBTASK-B": shell(name, "printf 'b%s' -ok"),
        "Do the steps.": "Forks.\n" + agent(name, "A", "fork") + "\n" + agent(name, "B", "fork"),
    }
    app = await run(proxy_tokenizer, installed(name), tmp_path, rules)
    check_agents(app, 2, [2, 2])
    parent, *forks = app.sink.records[:3]
    for fork in forks:
        # Its copy of the parent's turn has one of the two calls and no text: context, after the parent's whole prompt.
        assert fork.flags == ["partial_turn"]
        assert fork.prefix_len >= parent.prefix_len + len(parent.delta_ids)


async def test_qwen_memory_extraction_is_auxiliary(proxy_tokenizer: Any, tmp_path: Path) -> None:
    profile = installed("qwen_code", files={".qwen/settings.json": "{}"})
    rules: Rules = {"Managed memory directory": "Nothing.", "Do the steps.": "Done."}
    app = await run(proxy_tokenizer, profile, tmp_path, rules)
    assert roles(app) == {"main": 1, "auxiliary": 1}
    assert leaves(app) == {"main": 1}
