"""Order of the groups inside one dispatched set.

Only launch times change: every group of a set has the same version, so versions, counters and mean staleness stay as
they are (docs/scheduling.md). `longest_first` has a second half in the ledger: of the ready groups of one version, the
lightest trains first.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

from gyre.scheduling.config import SchedulerConfig, capacity
from gyre.scheduling.predictor import DurationPredictor, Features

Entry = tuple[int, str]
"""(dispatch number, query)"""

MOST_WAVES = 2.8
"""Beyond it the last executions of a set start long after the first have ended, in any order (docs/scheduling.md)."""


class LaunchOrder(Protocol):
    def arrange(self, entries: Sequence[Entry]) -> list[Entry]: ...

    def observe(self, query: str, seconds: float) -> None:
        """An execution of the query took this long."""
        ...

    def predict(self, query: str) -> float | None:
        """Seconds of one execution; None when the order predicts none."""
        ...


class Fifo:
    def arrange(self, entries: Sequence[Entry]) -> list[Entry]:
        return list(entries)

    def observe(self, query: str, seconds: float) -> None:
        """Needs no history."""

    def predict(self, query: str) -> float | None:  # noqa: ARG002
        return None


class LongestFirst:
    """Descending predicted duration of an execution; ties, and all before any execution has ended, keep dispatch
    order."""

    def __init__(self, features: Features = lambda _: ()) -> None:
        self._predictor = DurationPredictor(features)

    def arrange(self, entries: Sequence[Entry]) -> list[Entry]:
        return sorted(entries, key=lambda entry: -(self.predict(entry[1]) or 0.0))

    def observe(self, query: str, seconds: float) -> None:
        self._predictor.observe(query, seconds)

    def predict(self, query: str) -> float | None:
        return self._predictor.predict(query)


def waves(config: SchedulerConfig) -> float:
    """How often the executions that are in flight right after a dispatch fill the rollout capacity."""
    places = config.pool_capacity if config.mode == "async" else capacity(config, 0)
    return config.depth * config.executions_per_group / places


def launches_in(config: SchedulerConfig) -> Literal["fifo", "longest_first"]:
    """The order of launches. `longest_first` falls back to fifo where none helps: when all executions start at once,
    and after many waves. Its other half, that the lightest ready group trains first, stays: it does no harm."""
    return config.launch_order if 1.0 < waves(config) <= MOST_WAVES else "fifo"


def make_order(config: SchedulerConfig, features: Features = lambda _: ()) -> LaunchOrder:
    return Fifo() if launches_in(config) == "fifo" else LongestFirst(features)
