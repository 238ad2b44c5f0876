"""What the run of a harness asks of its sandbox, over a provider of the test's."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tiny_tasks import WINDOW, TaskWriter, make_spec

from gyre.core.errors import SandboxError
from gyre.harnesses import load_profile
from gyre.runner.budget import Budget
from gyre.runner.config import RunnerConfig, RunnerSection
from gyre.runner.harness import HarnessRunner
from gyre.sandboxes import ExecResult, SandboxLimits, SandboxSection, SandboxSpec
from gyre.tasks import load_task


class FakeSandbox:
    def __init__(self, spec: SandboxSpec, provider: "FakeProvider") -> None:
        self.spec = spec
        self._provider = provider

    async def start(self) -> None:
        self.spec.workspace.mkdir(parents=True)
        self._provider.booting += 1
        self._provider.most_booting = max(self._provider.most_booting, self._provider.booting)
        await asyncio.sleep(0)

    async def upload(self, *_: Any) -> None: ...

    async def write(self, target: str, content: str) -> None:
        self._provider.written[target] = content

    async def exec(self, argv: list[str], *, on_boot: Any, stdout: Path, stderr: Path, **more: Any) -> ExecResult:
        stdout.touch()
        stderr.touch()
        self._provider.execs.append(more)
        await asyncio.sleep(0)
        self._provider.booting -= 1
        on_boot()
        self._provider.running += 1
        self._provider.most_running = max(self._provider.most_running, self._provider.running)
        await self._provider.gate.wait()
        if self._provider.broken:
            raise SandboxError("no space")
        return self._provider.result

    async def close(self, *, keep: bool) -> None:
        self._provider.closed.append(keep)


class FakeProvider:
    def __init__(self) -> None:
        self.specs: list[SandboxSpec] = []
        self.execs: list[dict[str, Any]] = []
        self.written: dict[str, str] = {}
        self.closed: list[bool] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.broken = False
        self.booting = self.most_booting = self.running = self.most_running = 0
        self.result = ExecResult(exit_code=0, timed_out=False, boot_s=0.5, seconds=2.0)

    def create(self, spec: SandboxSpec) -> Any:
        self.specs.append(spec)
        return FakeSandbox(spec, self)


class World:
    def __init__(self, tmp_path: Path, shell_root: Path, **section: Any) -> None:
        self.provider = FakeProvider()
        limits = SandboxLimits(memory_mb=123, processes=45, output_mb=7)
        self.config = RunnerConfig(
            run_dir=str(tmp_path / "run"),
            window=WINDOW,
            harness_root=str(shell_root),
            section=RunnerSection(**section),
            sandbox=SandboxSection(limits=limits),
        )
        provider: Any = self.provider
        self.harness = HarnessRunner(self.config, provider)

    async def run(self, task: Path, name: str = "e-0") -> Any:
        access = make_spec(name, task).access
        run = self.harness.run
        return await run(
            name,
            load_task(task),
            load_profile("shell"),
            access,
            boot_timeout_s=3.0,
            timeout_s=9.0,
            budget=Budget(99.0),
        )


async def test_limits_of_the_run_and_of_the_task_and_the_budgets_reach_the_sandbox(
    tmp_path: Path, shell_root: Path, write_task: TaskWriter
) -> None:
    world = World(tmp_path, shell_root)
    await world.run(write_task("x", manifest="[environment]\nmemory_mb = 999"))
    (spec,) = world.provider.specs
    assert (spec.limits.memory_mb, spec.limits.processes, spec.limits.output_mb) == (999, 45, 7)
    (run,) = world.provider.execs
    assert (run["boot_timeout_s"], run["timeout_s"]) == (3.0, 9.0)
    assert world.provider.closed == [False, True]


async def test_boots_at_a_time_are_bounded_and_running_harnesses_are_not(
    tmp_path: Path, shell_root: Path, write_task: TaskWriter
) -> None:
    world = World(tmp_path, shell_root, boots=2)
    world.provider.gate.clear()
    task = write_task("x")
    runs = [asyncio.ensure_future(world.run(task, f"e-{n}")) for n in range(6)]
    while world.provider.running < 6:  # noqa: ASYNC110 — the loop turns until all have booted
        await asyncio.sleep(0)
    assert (world.provider.most_booting, world.provider.most_running) == (2, 6)
    world.provider.gate.set()
    await asyncio.gather(*runs)


@pytest.mark.parametrize(
    ("result", "cause"),
    [
        (ExecResult(exit_code=0, timed_out=False, boot_s=0.5, seconds=2.0), "completed"),
        (ExecResult(exit_code=3, timed_out=False, boot_s=0.5, seconds=2.0), "harness_exit"),
        (ExecResult(exit_code=None, timed_out=True, boot_s=0.5, seconds=2.0), "harness_timeout"),
        (ExecResult(exit_code=None, timed_out=False, exceeded="disk", boot_s=0.5, seconds=2.0), "harness_exit"),
    ],
)
async def test_every_end_has_its_cause_and_its_times(
    tmp_path: Path, shell_root: Path, write_task: TaskWriter, result: ExecResult, cause: str
) -> None:
    world = World(tmp_path, shell_root)
    world.provider.result = result
    run = await world.run(write_task("x"))
    assert (run.ending.cause, run.boot_s, run.harness_s) == (cause, 0.5, 2.0)


async def test_a_sandbox_that_breaks_is_an_ending_and_frees_its_place(
    tmp_path: Path, shell_root: Path, write_task: TaskWriter
) -> None:
    world = World(tmp_path, shell_root, boots=1)
    world.provider.broken = True
    task = write_task("x")
    for name in ("e-0", "e-1"):
        run = await world.run(task, name)
        assert (run.ending.cause, run.ending.message, run.ending.worked) == ("boot_failed", "no space", False)
