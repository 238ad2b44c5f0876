"""How long to wait after a failure before the next attempt, and when attempts have no prospect any more. Pure.

A failure is a setback of a name (a process, the reduction of gradients). Setbacks of one name in a row, without
progress between them, wait longer and longer. The run gives up only when a name had many of them, for a long time, and
nothing of what it is for has got on meanwhile: a count alone, or a time alone, says nothing about a run of weeks.
"""

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from gyre.core.config import Positive
from gyre.core.errors import GyreError


class RecoverySection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[recovery]: when a process counts as hung, and when the run gives up. docs/transitions.md says what happens."""

    RENAMED_KEYS: ClassVar[dict[str, str]] = {"losses": "futile_failures"}

    micro_step_s: Annotated[float, Meta(gt=0)] = 600.0
    """Deadline of a micro-step, for each of the micro-steps that a cell may have under way."""
    call_s: Annotated[float, Meta(gt=0)] = 600.0
    """Deadline of any other call on an engine or trainer: waking, loading weights, saving a checkpoint."""
    stall_s: Annotated[float, Meta(gt=0)] = 120.0
    """How long an engine with requests may produce nothing; how long any engine, proxy worker or runner may not
    answer."""
    futile_failures: Positive = 5
    futile_s: Annotated[float, Meta(gt=0)] = 3600.0
    """The run ends when one process is lost more than `futile_failures` times in a row, over at least `futile_s`, and
    nothing gets on between: no new version for trainers, no version and no closed execution for all others."""
    pause_s: Annotated[float, Meta(gt=0)] = 60.0
    """The longest pause before a process that is lost again and again is started again."""
    detached_s: Annotated[float, Meta(gt=0)] = 600.0
    """How long workers go on while no new controller gets on, after one was killed."""
    no_engine_s: Annotated[float, Meta(gt=0)] = 600.0
    """How long no engine at all may be alive. Calls are held for 900 s."""


class _Row(msgspec.Struct):
    """Setbacks of one name in a row."""

    first: float
    progress: int
    count: int = 0


class Setbacks:
    def __init__(self, limits: RecoverySection) -> None:
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
