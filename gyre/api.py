"""Gyre from Python: what the command line is made of. `import gyre` gives these names.

config = gyre.load_config("run.toml", "scheduler.max_steps=6")
for finding in gyre.check(config):
    print(finding.check, finding.problem or "ok")
run = gyre.train(config, run_dir="runs/first")         # blocks; in an event loop: await gyre.prepare(…).run()
print(run.summary().steps[-1].reward_mean)
trees = gyre.load_trees(run)                           # execution id → trajectory tree
run.write_report("first.html")
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gyre.control.live.config import RunConfig
from gyre.control.live.preflight import Finding, findings, preflight
from gyre.control.state import ControlView
from gyre.core import config as configs
from gyre.core.events import Event
from gyre.core.running_time import RunningTimeLoop
from gyre.core.system.programs import raise_open_files
from gyre.report.page import report_page
from gyre.report.summary import RunSummary, summarise
from gyre.report.trees import tree_summary
from gyre.scheduling.config import SchedulerConfig
from gyre.simulation.cli import from_run
from gyre.simulation.planning.command import Request as PlanRequest
from gyre.simulation.planning.command import plan as plan_scheduler
from gyre.store import RunDir
from gyre.trajectory.tree import TrajectoryTree

OnView = Callable[[ControlView], None]


class Run:
    """A run directory, as its readers have it: while the run goes on, after it ended, and after it was killed."""

    def __init__(self, directory: str | Path) -> None:
        """Raises ConfigError when there is no run."""
        self.directory = RunDir.open(Path(directory))

    @property
    def config(self) -> RunConfig:
        """The effective configuration."""
        return configs.load(self.directory.config, [], RunConfig)

    def events(self) -> Iterator[Event]:
        """The journal, in order of commit."""
        yield from self.directory.open_store(read_only=True).events()

    def summary(self) -> RunSummary:
        store = self.directory.open_store(read_only=True)
        trees = {execution_id: tree_summary(store.records(execution_id)) for execution_id in store.execution_ids()}
        return summarise(store.events(), store.outcomes(), trees)

    def write_report(self, path: str | Path) -> None:
        """One self-contained HTML file: facts, pictures, tables, configuration. Raises OSError."""
        store = self.directory.open_store(read_only=True)
        text = report_page(self.summary(), list(store.events()), self.directory.config.read_text())
        Path(path).write_text(text, encoding="utf-8")


class Training:
    """A run that passed every check and is this process's to train. A context manager: leaving it gives it back."""

    def __init__(self, config: RunConfig, run_dir: RunDir, notes: Sequence[str]) -> None:
        self.config = config
        self.run_dir = run_dir
        self.notes = notes
        """What is allowed and may not be what was meant, a sentence each."""
        self._claim = run_dir.claim()
        self.checkpoint = run_dir.latest_checkpoint()
        """What the run goes on from; None when it starts."""

    async def run(self, on_view: OnView = lambda _: None) -> None:
        """Trains to the end. Cancel it to interrupt: executions end first, then every process. Raises GyreError."""
        # Needs torch, which reading a run or checking a configuration does without.
        from gyre.control.live.run import Run as LiveRun

        raise_open_files()
        await LiveRun(self.config, self.run_dir, on_view).train(self.checkpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._claim.close()


def load_config(path: str | Path, *overrides: str) -> RunConfig:
    """The configuration of a TOML file, with `section.key=value` overrides. Raises ConfigError."""
    return configs.load(Path(path), overrides, RunConfig)


def check(
    config: RunConfig, where: str = "config", *, run_dir: str | Path | None = None, resume: Run | None = None
) -> list[Finding]:
    """Every check of preflight, with what each found; starts nothing. `where` names the configuration in sentences,
    `run_dir` is where a new run would lie, `resume` the run that would go on."""
    directory = None if run_dir is None else Path(run_dir)
    return findings(config, where, run_dir=directory, resume=resume.directory if resume else None)


def prepare(config: RunConfig, where: str = "config", *, run_dir: str | Path | None = None) -> Training:
    """Checks everything and makes the run directory, `runs/run-<time>` by default. Raises ConfigError."""
    directory = Path(run_dir) if run_dir else Path("runs") / f"run-{time.strftime('%Y%m%d-%H%M%S')}"
    notes = preflight(config, where, run_dir=directory)
    return Training(config, RunDir.create(directory, configs.dump(config)), notes)


def prepare_resumption(run_dir: str | Path, *overrides: str) -> Training:
    """The same for a run that goes on from its newest whole checkpoint. Raises ConfigError."""
    run = RunDir.open(Path(run_dir))
    config = configs.load(run.config, overrides, RunConfig)
    return Training(config, run, preflight(config, str(run.config), resume=run))


def train(config: RunConfig, *, run_dir: str | Path | None = None, on_view: OnView = lambda _: None) -> Run:
    """Trains to the configured step and returns the run. Raises ConfigError before anything starts, GyreError when the
    run fails, RuntimeError in a running event loop (await `prepare(…).run()` there)."""
    with prepare(config, run_dir=run_dir) as training:
        return _to_end(training, on_view)


def resume(run_dir: str | Path, *overrides: str, on_view: OnView = lambda _: None) -> Run:
    """Goes on with a run that ended; overrides as in `load_config`. Raises as `train` does."""
    with prepare_resumption(run_dir, *overrides) as training:
        return _to_end(training, on_view)


def plan(config: RunConfig | SchedulerConfig, **request: Any) -> str:
    """What `gyre plan` says; `request`: the fields of `gyre.simulation.planning.command.Request`. Raises
    ConfigError."""
    if isinstance(config, RunConfig):
        return plan_scheduler(config.scheduler, PlanRequest(**request), graders=config.evaluation.at_a_time)
    return plan_scheduler(config, PlanRequest(**request))


def simulate(run_dir: str | Path, **changes: Any) -> dict[str, Any]:
    """A recorded run under the virtual clock, as it was and with `changes` to keys of `[scheduler]`; hours of both."""
    return from_run(Path(run_dir), changes or None)


def load_trees(run: Run | str | Path) -> dict[str, TrajectoryTree]:
    """The trajectory tree of every execution that made a call, by execution id."""
    opened = run if isinstance(run, Run) else Run(run)
    store = opened.directory.open_store(read_only=True)
    return {
        execution_id: TrajectoryTree.from_records(store.records(execution_id)) for execution_id in store.execution_ids()
    }


def _to_end(training: Training, on_view: OnView) -> Run:
    with asyncio.Runner(loop_factory=RunningTimeLoop) as runner:
        runner.run(training.run(on_view))
    return Run(training.run_dir.root)
