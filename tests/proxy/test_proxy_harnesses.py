"""Unmodified harness binaries against the proxy with a scripted policy, their engine moving under them."""

import asyncio
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from proxy_app import App, running_app
from proxy_fakes import tool_call

pytestmark = pytest.mark.harness


def binary(variable: str) -> str:
    path = os.environ.get(variable, "")
    if not Path(path).is_file():
        pytest.skip(f"{variable} does not name an installed harness")
    return path


async def run(command: list[str], home: Path, **env: str) -> str:
    """Runs the harness with nothing of this machine in its environment; returns its output."""
    workspace = home / "workspace"
    workspace.mkdir()
    path = os.pathsep.join({"/usr/bin", "/bin", str(Path(shutil.which("node") or "/usr/bin/node").parent)})
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=workspace,
        env={"PATH": path, "HOME": str(home), "LANG": "C.UTF-8", **env},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(120):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, output.decode()[-2000:]
    return output.decode()


async def move_once(app: App) -> None:
    """As soon as the second call is under way on engine 0, that engine leaves and engine 1 takes over."""
    reached = asyncio.Event()

    async def step(done: int) -> None:
        if len(app.engines[0].requests) == 2 and done >= 10:
            reached.set()
            await asyncio.Event().wait()

    app.engines[0].step = step
    app.router.set_routes([app.route(0)])
    await reached.wait()
    app.router.set_routes([app.route(1)])
    report = await app.proxy.drain(0)
    assert (report.rerouted, report.failed) == (1, 0)


def check_chain(app: App, calls: int) -> None:
    """One main path: every call continues the one before from its exact tokens; the second was moved."""
    records = app.sink.records
    assert [record.role for record in records] == ["main"] * calls
    for before, after in itertools.pairwise(records):
        assert after.parent == before.call_id
        assert after.prefix_len == before.prefix_len + len(before.delta_ids) + len(before.output_ids)
    assert [record.cells for record in records] == [[0], [0, 1], *[[1]] * (calls - 2)]
    sent = [request for engine in app.engines.values() for request in engine.requests]
    assert len(sent) == calls + 1


def bash_answers(tool: str) -> Any:
    def answer(prompt: str) -> str:
        # What the policy wrote itself does not count: only tool responses do.
        done = sum("-ok" in part.split("</tool_response>")[0] for part in prompt.split("<tool_response>")[1:])
        if done == 0:
            return "<think>\nA plan.\n</think>\n\nFirst.\n" + tool_call(tool, '{"command": "echo first-ok"}')
        if done == 1:
            return "Second.\n" + tool_call(tool, '{"command": "echo second-ok > two.txt; cat two.txt"}')
        if tool == "bash":
            return "Done.\n" + tool_call(tool, '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}')
        return "All done."

    return answer


async def test_claude_code_runs_a_tool_loop_over_two_engines(proxy_tokenizer: Any, tmp_path: Path) -> None:
    claude = binary("GYRE_TEST_CLAUDE")
    async with running_app(proxy_tokenizer, bash_answers("Bash"), cells=2) as app:
        moving = asyncio.create_task(move_once(app))
        flags = ["--dangerously-skip-permissions", "--output-format", "text", "--model", "policy-model", "--bare"]
        flags += ["--system-prompt", "You are a coding agent.", "--tools", "Bash,Read,Edit,Write"]
        output = await run(
            [claude, "-p", "Do the two steps.", *flags, "--disable-slash-commands"],
            tmp_path,
            ANTHROPIC_BASE_URL=app.url,
            ANTHROPIC_API_KEY=app.access.api_key,
            IS_SANDBOX="1",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
            DISABLE_TELEMETRY="1",
            DISABLE_ERROR_REPORTING="1",
            DISABLE_AUTOUPDATER="1",
            CLAUDE_CODE_ATTRIBUTION_HEADER="0",
        )
        await moving
        assert output.strip() == "All done."
        assert (tmp_path / "workspace" / "two.txt").read_text() == "second-ok\n"
        check_chain(app, 3)


async def test_mini_swe_agent_runs_a_tool_loop_over_two_engines(proxy_tokenizer: Any, tmp_path: Path) -> None:
    mini = binary("GYRE_TEST_MINI")
    async with running_app(proxy_tokenizer, bash_answers("bash"), cells=2) as app:
        moving = asyncio.create_task(move_once(app))
        await run(
            [mini, "-y", "-t", "Do the two steps.", "-m", "openai/policy-model", "--exit-immediately", "-l", "0",
             "-o", str(tmp_path / "trajectory.json")],
            tmp_path,
            OPENAI_API_KEY=app.access.api_key,
            OPENAI_API_BASE=app.url + "/v1",
            MSWEA_CONFIGURED="true",
            MSWEA_SILENT_STARTUP="1",
            MSWEA_COST_TRACKING="ignore_errors",
            LITELLM_LOCAL_MODEL_COST_MAP="True",
        )  # fmt: skip
        await moving
        assert (tmp_path / "workspace" / "two.txt").read_text() == "second-ok\n"
        check_chain(app, 3)
