"""Executions outlive the runner: the shim holds them, and a new runner finds them. Real processes and sandboxes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tiny_tasks import WINDOW, TaskWriter, make_spec

from gyre.core.records import CallFacts, Validity
from gyre.launch import LocalLauncher, ProcessSpec
from gyre.launch.local import LocalProcess
from gyre.rpc import connect
from gyre.runner.base import Runner
from gyre.runner.config import RunnerConfig
from gyre.store import RunStore

CALLS = CallFacts(answered=1)


class Node:
    """A shim, and as many runners as are started, one after the other."""

    def __init__(self, launcher: LocalLauncher, tmp: Path, root: Path) -> None:
        self._launcher = launcher
        self._env = {"PYTHONPATH": str(Path(__file__).parent), "TEST_PROFILES": str(tmp / "profiles")}
        self.run_dir = tmp / "run"
        self._config = RunnerConfig(run_dir=str(self.run_dir), window=WINDOW, harness_root=str(root))
        self._connections: list = []
        self.processes: list[LocalProcess] = []

    async def _start(self, name: str, entry: str, config: RunnerConfig) -> LocalProcess:
        raw = msgspec.Raw(msgspec.json.encode(config))
        return await self._launcher.start(
            ProcessSpec(name=name, entry=f"shell_worker:{entry}", config=raw, env=self._env)
        )

    async def shim(self) -> LocalProcess:
        process = await self._start(f"shim.{len(self.processes)}", "held", self._config)
        self._config = msgspec.structs.replace(self._config, shim=process.address)
        self.processes.append(process)
        return process

    async def runner(self) -> Runner:
        process = await self._start(f"runner.{len(self.processes)}", "main", self._config)
        self.processes.append(process)
        connection = connect(Runner, process.address, self._launcher.secret)
        self._connections.append(connection)
        return connection.stub

    async def close(self) -> None:
        for connection in self._connections:
            await connection.close()


@pytest.fixture
async def node(tmp_path: Path, shell_root: Path) -> AsyncIterator[Node]:
    (tmp_path / "run").mkdir()
    RunStore(tmp_path / "run/gyre.sqlite").close()
    async with LocalLauncher(tmp_path) as launcher:
        node = Node(launcher, tmp_path, shell_root)
        yield node
        await node.close()


async def until_it_runs(node: Node, write_task: TaskWriter, execution_id: str, how: str = "t") -> tuple[Runner, object]:
    """An execution that says that it runs, and ends when it is told to."""
    task = write_task("echo x >> out; echo > begun; cat go", name=how, test="cp /app/out /logs/verifier/reward.txt")
    for name in ("begun", "go"):
        os.mkfifo(task / "environment/workspace" / name)
    runner = await node.runner()
    spec = make_spec(execution_id, task)
    await runner.start(spec)
    app = node.run_dir / "workspaces" / execution_id / "app"
    while not (app / "begun").exists():  # noqa: ASYNC110 — a FIFO cannot be waited for before it exists
        await asyncio.sleep(0.01)
    await asyncio.to_thread((app / "begun").read_text)
    return runner, spec


def go(node: Node, execution_id: str) -> None:
    (node.run_dir / "workspaces" / execution_id / "app/go").write_text("1")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_an_execution_outlives_its_runner(node: Node, write_task: TaskWriter, how: int) -> None:
    await node.shim()
    _, spec = await until_it_runs(node, write_task, "e-0")
    os.kill(node.processes[-1].pid, how)
    await node.processes[-1].wait()
    # It ends while nobody is there, and its budgets go on: the shim keeps them.
    await asyncio.to_thread(go, node, "e-0")
    runner = await node.runner()
    await runner.start(spec)
    await runner.wait_closed("e-0")
    assert (node.run_dir / "workspaces/e-0/app/out").read_text() == "x\n", "the harness ran once"
    report = await runner.wait("e-0", CALLS)
    assert report.outcome.cause == "completed"

    # A third one knows the outcome, although it never saw the execution.
    os.kill(node.processes[-1].pid, signal.SIGKILL)
    await node.processes[-1].wait()
    runner = await node.runner()
    await runner.start(spec)
    await runner.wait_closed("e-0")
    assert (await runner.wait("e-0", CALLS)).outcome == report.outcome


async def test_a_new_runner_cancels_what_another_one_started(node: Node, write_task: TaskWriter) -> None:
    await node.shim()
    _, spec = await until_it_runs(node, write_task, "e-0")
    os.kill(node.processes[-1].pid, signal.SIGKILL)
    await node.processes[-1].wait()
    runner = await node.runner()
    await runner.start(spec)
    await runner.cancel("e-0")
    assert (await runner.wait("e-0", CALLS)).outcome.cause == "cancelled"


async def test_an_execution_whose_shim_is_lost_ends_unscored_and_does_not_start_anew(
    node: Node, write_task: TaskWriter
) -> None:
    shim = await node.shim()
    runner, spec = await until_it_runs(node, write_task, "e-0")
    os.kill(shim.pid, signal.SIGKILL)
    await runner.wait_closed("e-0")
    outcome = (await runner.wait("e-0", CALLS)).outcome
    assert (outcome.cause, outcome.validity) == ("sandbox_lost", Validity.UNRESOLVED)

    # Also when both are lost at the same time, and nobody saw the end.
    await node.shim()
    _, spec = await until_it_runs(node, write_task, "e-1", how="u")
    for process in node.processes[-2:]:
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
    await node.shim()
    runner = await node.runner()
    await runner.start(spec)
    await runner.wait_closed("e-1")
    assert (await runner.wait("e-1", CALLS)).outcome.cause == "sandbox_lost"
    assert (node.run_dir / "workspaces/e-1/app/out").read_text() == "x\n"
