"""How long to wait after a loss before the next attempt, and when attempts have no prospect any more. Pure.

A loss is a setback of a name (a process, the reduction of gradients). Setbacks of one name in a row, without progress
between them, wait longer and longer. The run gives up only when a name had many of them, for a long time, and nothing
of what it is for has got on meanwhile: a count alone, or a time alone, says nothing about a run of weeks.
"""

import msgspec

from gyre.core.errors import GyreError


class RecoveryLimits(msgspec.Struct, frozen=True, kw_only=True):
    """When recovery gives up."""

    futile_failures: int = 5
    """Setbacks of one name in a row, and"""
    futile_s: float = 3600.0
    """the time since the first of them, after which the next one ends the run."""
    pause_s: float = 60.0
    """The longest pause before an attempt."""
    no_engine_s: float = 600.0
    """How long no engine at all may be alive."""


class _Row(msgspec.Struct):
    """Setbacks of one name in a row."""

    first: float
    progress: int
    count: int = 0


class Setbacks:
    def __init__(self, limits: RecoveryLimits) -> None:
        self._limits = limits
        self._rows: dict[str, _Row] = {}

    def note(self, name: str, detail: str, now: float, progress: int) -> float:
        """A setback at `now`; `progress` is a number that grows when the run gets on. Returns the seconds to wait: none
        after the first in a row, then one, two, four, … Raises GyreError when it was one too many."""
        row = self._rows.get(name)
        if row is None or row.progress != progress:
            row = self._rows[name] = _Row(first=now, progress=progress)
        row.count += 1
        limits, seconds = self._limits, now - row.first
        if row.count > limits.futile_failures and seconds >= limits.futile_s:
            raise GyreError(
                f"{name} was lost {row.count} times in {seconds:.0f} s and nothing got on meanwhile, last: {detail}; "
                "remove the cause, then continue with gyre train --resume"
            )
        return min(limits.pause_s, 2.0 ** (row.count - 2)) if row.count > 1 else 0.0
