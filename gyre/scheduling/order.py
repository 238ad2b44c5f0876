"""Order of the groups inside one dispatched set.

Only launch times change: every group of a set has the same version, so versions, counters and mean staleness stay as
they are (docs/scheduling.md). `longest_first` has a second half in the ledger: of the ready groups of one version, the
lightest trains first.
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

Entry = tuple[int, str]
"""(dispatch number, query)"""


class LaunchOrder(Protocol):
    def arrange(self, entries: Sequence[Entry]) -> list[Entry]: ...

    def observe(self, query: str, seconds: float) -> None:
        """An execution of the query took this long."""
        ...


class Fifo:
    def arrange(self, entries: Sequence[Entry]) -> list[Entry]:
        return list(entries)

    def observe(self, query: str, seconds: float) -> None:
        """Needs no history."""


class LongestFirst:
    """Descending predicted duration of an execution; ties keep dispatch order.

    The prediction is the mean over the executions of the query seen so far; before there are any, `prior` (for example
    from the length of the specification, in seconds), or else the mean over all executions.
    """

    def __init__(self, prior: Callable[[str], float] | None = None) -> None:
        self._prior = prior
        self._seen: dict[str, tuple[int, float]] = {}
        self._all = (0, 0.0)

    def arrange(self, entries: Sequence[Entry]) -> list[Entry]:
        return sorted(entries, key=lambda entry: -self.predict(entry[1]))

    def observe(self, query: str, seconds: float) -> None:
        count, total = self._seen.get(query, (0, 0.0))
        self._seen[query] = (count + 1, total + seconds)
        self._all = (self._all[0] + 1, self._all[1] + seconds)

    def predict(self, query: str) -> float:
        """Seconds of one execution."""
        count, total = self._seen.get(query, (0, 0.0))
        if count:
            return total / count
        if self._prior is not None:
            return self._prior(query)
        return self._all[1] / self._all[0] if self._all[0] else 0.0


def make_order(name: Literal["fifo", "longest_first"], prior: Callable[[str], float] | None = None) -> LaunchOrder:
    return Fifo() if name == "fifo" else LongestFirst(prior)
