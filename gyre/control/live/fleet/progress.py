"""Liveness of engines is progress, not an answer: an engine that has requests and produces nothing is hung.

Trainers need no watch of this kind: every call on them has a deadline (`cells`).
"""

import asyncio

from gyre.control.base import ProcessFailure
from gyre.control.live.fleet.fleet import Fleet, Started
from gyre.core.clock import Clock
from gyre.core.errors import GyreError
from gyre.core.running_time import Silence
from gyre.engines.base import EngineStatus

POLLS = 4
"""Looks per `stall_s`."""


class Liveness:
    """What was seen of one engine. Pure."""

    def __init__(self, now: float, most_s: float) -> None:
        """`most_s`: what counts between two looks, at most. Whoever was stopped in between has not looked."""
        self._silence = Silence(now, most_s)
        self._tokens = -1

    def observe(self, now: float, status: EngineStatus | None) -> float:
        """Seconds without progress, as far as someone looked. No answer (None) is none; an engine without anything to
        do needs none."""
        if status is None:
            return self._silence.look(now, sign=False)
        sign = not status.running or status.paused or status.generated_tokens != self._tokens
        self._tokens = status.generated_tokens
        return self._silence.look(now, sign)


class EngineWatch:
    def __init__(self, fleet: Fleet, clock: Clock, stall_s: float) -> None:
        self._fleet = fleet
        self._clock = clock
        self._stall_s = stall_s
        self._seen: dict[Started, Liveness] = {}

    async def run(self) -> None:
        """Reports every stalled engine once as a loss; ends only by cancellation."""
        while True:
            await self._clock.sleep(self._stall_s / POLLS)
            engines = self._fleet.engines()
            now = self._clock.now()
            # A look takes an interval for the sleep and at most another for the answer.
            most_s = 2 * self._stall_s / POLLS
            self._seen = {engine: self._seen.get(engine) or Liveness(now, most_s) for engine in engines}
            statuses = await asyncio.gather(*(self._status(engine) for engine in engines))
            now = self._clock.now()
            for engine, status in zip(engines, statuses, strict=True):
                idle_s = self._seen[engine].observe(now, status)
                if idle_s >= self._stall_s and engine in self._fleet.engines():
                    what = "did not answer" if status is None else f"produced nothing for {status.running} requests"
                    failure = ProcessFailure(worker=engine.worker, detail=f"it {what} in {idle_s:.0f} s")
                    self._fleet.failures.put_nowait(failure)

    async def _status(self, engine: Started) -> EngineStatus | None:
        try:
            async with asyncio.timeout(self._stall_s / POLLS):
                status: EngineStatus = await engine.connection.stub.status()
                return status
        except (GyreError, TimeoutError):
            return None
