"""A run as the pages see it: read again only when its journal has grown, and only the parts that a page shows."""

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cached_property

import msgspec
from matplotlib.figure import Figure

from gyre.core.errors import ConfigError
from gyre.core.events import Event
from gyre.core.records import Assessment, CallRecord, Outcome
from gyre.report import plots
from gyre.report.summary import ExecutionSummary, RunSummary, summarise
from gyre.report.text import Decode, decoder
from gyre.report.timeline import mentioned
from gyre.report.trees import TreeSummary, tree_summary
from gyre.scheduling.config import SchedulerConfig, require
from gyre.scheduling.plan import explain
from gyre.store import RunDir
from gyre.store.journal import on_one_axis

TIMELINE_STEPS = 48
"""The timeline shows the last ones; more in one picture cannot be told apart."""
KEPT_TREES = 1000


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    row: int
    """Last row of the journal that is in it."""
    events: list[Event]
    """On one axis."""
    summary: RunSummary
    """Without trees: `RunView.with_trees` adds those of the executions that a page shows."""


class ExecutionView(msgspec.Struct, frozen=True, kw_only=True):
    """All that is stored about one execution; `outcome` is None while it runs."""

    records: list[CallRecord]
    outcome: Outcome | None
    assessments: list[Assessment]


class RunView:
    """One run directory; threads may share it. Nothing is written, and no database connection outlives a read."""

    def __init__(self, run: RunDir) -> None:
        """Raises ConfigError when the run's database cannot be read by this Gyre."""
        self.run = run
        self.store = run.open_store(read_only=True)
        self._reading = threading.Lock()
        self._drawing = threading.Lock()
        self._raw: list[Event] = []
        self._snapshot: Snapshot | None = None
        self._trees: dict[str, tuple[int, TreeSummary]] = {}
        self._charts: dict[str, tuple[int, bytes]] = {}

    def snapshot(self) -> Snapshot:
        with self._reading:
            new, row = self.store.events_after(self._snapshot.row if self._snapshot else 0)
            if self._snapshot is None or new:
                self._raw += new
                summary = summarise(self._raw, self.store.outcomes(), {})
                self._snapshot = Snapshot(row=row, events=on_one_axis(self._raw), summary=summary)
            return self._snapshot

    def with_trees(self, executions: list[ExecutionSummary]) -> list[ExecutionSummary]:
        """Reads the records only of executions that have made another call since their tree was last asked for."""
        return [msgspec.structs.replace(execution, tree=self._tree(execution.id)) for execution in executions]

    def execution(self, execution_id: str) -> ExecutionView | None:
        """None when the run has neither started it nor recorded anything of it."""
        records, outcome = self.store.records(execution_id), self.store.outcome(execution_id)
        if not records and outcome is None:
            started = self.snapshot().summary.executions
            if all(execution.id != execution_id for execution in started):
                return None
        return ExecutionView(records=records, outcome=outcome, assessments=self.store.assessments(execution_id))

    def charts(self) -> list[str]:
        """Names of the charts that the journal has something to draw in."""
        snapshot = self.snapshot()
        return [name for name, (is_there, _) in _CHARTS.items() if is_there(snapshot)]

    def chart(self, name: str) -> bytes | None:
        """SVG of one of `charts`; None for any other name."""
        if name not in self.charts():
            return None
        with self._drawing:  # matplotlib shares caches between figures
            snapshot = self.snapshot()
            row, drawn = self._charts.get(name, (-1, b""))
            if row != snapshot.row:
                drawn = plots.svg(_CHARTS[name][1](snapshot))
                self._charts[name] = (snapshot.row, drawn)
            return drawn

    @cached_property
    def decode(self) -> Decode | None:
        """Token ids → text; None when the tokenizer is not there."""
        return decoder(self.run)

    def explanation(self) -> list[str]:
        """The scheduler's config in paragraphs, or one sentence that says why this Gyre cannot explain it."""
        try:
            config = msgspec.toml.decode(self.run.config.read_bytes(), type=_Config).scheduler
            require(config)
        except (msgspec.DecodeError, ConfigError) as error:
            return [f"The [scheduler] section of config.toml cannot be explained: {error}."]
        return explain(config).split("\n\n")

    def last_written(self) -> str:
        """When the database last changed, in UTC."""
        log = self.run.database.with_name(self.run.database.name + "-wal")
        changed = max(path.stat().st_mtime for path in (self.run.database, log) if path.exists())
        return datetime.fromtimestamp(changed, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")

    def _tree(self, execution_id: str) -> TreeSummary:
        calls = self.store.record_count(execution_id)
        known = self._trees.get(execution_id)
        if known is not None and known[0] == calls:
            return known[1]
        tree = tree_summary(self.store.records(execution_id))
        if len(self._trees) >= KEPT_TREES:
            self._trees.clear()
        self._trees[execution_id] = (calls, tree)
        return tree


class _Config(msgspec.Struct):
    """The part of config.toml that is explained."""

    scheduler: SchedulerConfig


def _has_steps(snapshot: Snapshot) -> bool:
    return bool(snapshot.summary.steps)


def _has_cells(snapshot: Snapshot) -> bool:
    return any(mentioned(event) for event in snapshot.events)


def _timeline(snapshot: Snapshot) -> Figure:
    before = snapshot.summary.steps[:-TIMELINE_STEPS]
    return plots.timeline_figure(snapshot.events, before[-1].t if before else 0.0)


_CHARTS: dict[str, tuple[Callable[[Snapshot], bool], Callable[[Snapshot], Figure]]] = {
    "reward": (_has_steps, lambda snapshot: plots.reward_figure(snapshot.summary)),
    "staleness": (_has_steps, lambda snapshot: plots.staleness_figure(snapshot.summary)),
    "timeline": (_has_cells, _timeline),
}
