"""Unmodified harness binaries against the proxy with a scripted policy, their engine moving under them."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
from harness_runs import harness, installed
from proxy_app import App, running_app
from proxy_fakes import tool_call

pytestmark = pytest.mark.harness


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


@pytest.mark.parametrize(("name", "tool"), [("claude_code", "Bash"), ("mini_swe_agent", "bash")])
async def test_T15_a_tool_loop_goes_on_over_another_engine(
    proxy_tokenizer: Any, tmp_path: Path, name: str, tool: str
) -> None:
    profile = installed(name)
    async with running_app(proxy_tokenizer, bash_answers(tool), cells=2) as app:
        async with asyncio.TaskGroup() as group:
            moving = group.create_task(move_once(app))
            async with harness(profile, app, tmp_path, "Do the two steps.") as running:
                code, output = await running.end()
            assert code == 0, output[-2000:]
            assert moving.done()
        assert (tmp_path / "workspace" / "two.txt").read_text() == "second-ok\n"
        check_chain(app, 3)
