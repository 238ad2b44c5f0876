"""Order of the groups inside one dispatched set.

Only launch times change: every group of a set has the same version, so versions, counters and mean staleness stay as
they are (docs/scheduling.md).
"""

from collections.abc import Callable, Sequence
from typing import Protocol

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
    """Descending predicted duration; ties keep dispatch order."""

    def __init__(self, predict: Callable[[str], float], learn: Callable[[str, float], None] | None = None) -> None:
        self._predict = predict
        self._learn = learn

    def arrange(self, entries: Sequence[Entry]) -> list[Entry]:
        return sorted(entries, key=lambda entry: -self._predict(entry[1]))

    def observe(self, query: str, seconds: float) -> None:
        if self._learn is not None:
            self._learn(query, seconds)
