"""Virtual time: an asyncio event loop that never waits but jumps to its next timer.

The loop does no I/O: the only things that can happen are ready callbacks and timers, so a run is deterministic. Nothing
ready and no timer means that every task waits for something that cannot come: that raises instead of hanging. So does
a run that goes on for longer than anybody would run it.
"""

import asyncio
import math
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from gyre.core.errors import GyreError

T = TypeVar("T")

HORIZON_S = 1e9
"""Latest virtual time, about 32 years. Seconds are still exact to a microsecond."""

YEAR_S = 365.25 * 24 * 3600.0
RESOLUTION_S = 1e-9


class VirtualDeadlock(GyreError):
    """Every task waits, and no timer is left to wake one."""


class VirtualTimeExceeded(GyreError):
    """The run goes on beyond HORIZON_S."""


class _JumpSelector(selectors.SelectSelector):
    """Advances the time of its loop by the time-out instead of waiting it out."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise VirtualDeadlock("Every task waits and no timer is left; the simulated run can never go on.")
        later = self.now + max(0.0, timeout)
        if later > HORIZON_S:
            raise VirtualTimeExceeded(
                f"The simulated run is not over after {HORIZON_S / YEAR_S:.0f} years; give it more capacity, fewer "
                "steps or shorter waits."
            )
        self.now = later
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _JumpSelector()
        super().__init__(self._jump)

    def time(self) -> float:
        now = self._jump.now
        # asyncio runs the timers before now + resolution. From 2^24 s on, a sum with the default is `now` itself, and a
        # timer that is due would never run.
        self._clock_resolution = max(RESOLUTION_S, math.ulp(now))
        return now


class VirtualClock:
    """The `Clock` of the running VirtualLoop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` from time 0 to its end in a fresh virtual loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
