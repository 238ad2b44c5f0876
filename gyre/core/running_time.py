"""An event loop whose time stands still while its process does not run.

A deadline is a promise of someone who looks. A process that was stopped (SIGSTOP, a debugger, a machine that swaps) and
goes on would otherwise find every deadline passed at once, and take healthy peers for dead before it has read their
answers. So `time()`, and with it every `asyncio.timeout` and `call_later`, leaves out each gap in which the loop did
not come round; a tick makes sure that an idle loop does.
"""

import asyncio
import time
from collections.abc import Callable

TICK_S = 1.0
GAP_S = 5.0
"""Between two looks at the clock; a loop that ticks and runs has none that long."""


class RunningTimeLoop(asyncio.SelectorEventLoop):
    """`asyncio.Runner(loop_factory=RunningTimeLoop)`. `clock`: seconds that never go back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked = clock()
        self._left_out = 0.0
        super().__init__()

    def time(self) -> float:
        now = self._clock()
        if now - self._looked > GAP_S:
            self._left_out += now - self._looked
        self._looked = now
        return now - self._left_out

    def run_forever(self) -> None:
        self._tick()
        try:
            super().run_forever()
        finally:
            self._next.cancel()

    def _tick(self) -> None:
        self._next = self.call_later(TICK_S, self._tick)


class Silence:
    """How long somebody gave no sign, as far as someone looked. Pure."""

    def __init__(self, now: float, most_s: float) -> None:
        """`most_s`: what counts between two looks, at most. Whoever did not run in between has not looked."""
        self._looked = now
        self._most_s = most_s
        self.seconds = 0.0

    def look(self, now: float, sign: bool) -> float:
        """Seconds without a sign, this look included."""
        self.seconds = 0.0 if sign else self.seconds + min(now - self._looked, self._most_s)
        self._looked = now
        return self.seconds
