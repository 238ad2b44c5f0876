"""Virtual time: an asyncio event loop that never waits but jumps to its next timer.

The loop does no I/O: the only things that can happen are ready callbacks and timers, so a run is deterministic.
Timers of one instant run in the order in which they were set. Nothing ready and no timer means that every task waits
for something that cannot come: that raises instead of hanging. So does a run that goes on for longer than anybody
would run it.

A simulated run is little else than callbacks, so this loop keeps only what they need: all callbacks run in one context
(context variables are shared), and there is no debug mode.
"""

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

from gyre.core.errors import GyreError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

HORIZON_S = 1e9
"""Latest virtual time, about 32 years. Seconds are still exact to a microsecond."""

YEAR_S = 365.25 * 24 * 3600.0
RESOLUTION_S = 1e-9
"""Timers that are no further apart are due at the same instant."""


class VirtualDeadlock(GyreError):
    """Every task waits, and no timer is left to wake one."""


class VirtualTimeExceeded(GyreError):
    """The run goes on beyond HORIZON_S."""


class _Call(asyncio.TimerHandle):
    """A callback that is ready or set for a time; asyncio's own class without what a loop with I/O and debug needs."""

    __slots__ = ()

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], when: float) -> None:
        self._callback = callback
        self._args = args
        self._when = when
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    def __repr__(self) -> str:
        return f"<{self._callback!r} at {self._when}>"


class VirtualLoop(asyncio.BaseEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._calls: deque[_Call] = deque()
        self._timers: list[tuple[float, int, _Call]] = []
        self._count = 0
        self._stopping = False

    def time(self) -> float:
        return self._now

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,  # noqa: ARG002  one context for all
    ) -> asyncio.Handle:
        call = _Call(callback, args, self._now)
        self._calls.append(call)
        return call

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Ctrl-C uses it; there is no selector to wake."""
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,  # noqa: ARG002
    ) -> asyncio.TimerHandle:
        call = _Call(callback, args, when)
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, call))
        return call

    def _run_once(self) -> None:
        """Runs until the loop is stopped; `BaseEventLoop.run_forever` would call it again otherwise."""
        while not self._stopping:
            if not self._calls:
                self._jump()
            try:
                self._run_calls()
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001  as asyncio's handles do
                self.call_exception_handler({"message": "a callback of the simulated run failed", "exception": error})

    def _run_calls(self) -> None:
        """In rounds, as asyncio's: a call that is made in one round runs in the next, after the timers due by then."""
        calls, timers = self._calls, self._timers
        while calls and not self._stopping:
            due = self._now + max(RESOLUTION_S, math.ulp(self._now))
            while timers and timers[0][0] < due:
                calls.append(heapq.heappop(timers)[2])
            for _ in range(len(calls)):
                call = calls.popleft()
                if not call._cancelled:
                    call._callback(*call._args)

    def _jump(self) -> None:
        """To the next timer that is not cancelled, which becomes ready."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise VirtualDeadlock("Every task waits and no timer is left; the simulated run can never go on.")
        when, _, call = heapq.heappop(timers)
        if when > HORIZON_S:
            raise VirtualTimeExceeded(
                f"The simulated run is not over after {HORIZON_S / YEAR_S:.0f} years; give it more capacity, fewer "
                "steps or shorter waits."
            )
        self._now = max(self._now, when)
        self._calls.append(call)


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
