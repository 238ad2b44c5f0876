"""Executions whose harness phase slows down with the load of the engines, and which are graded afterwards.

All running harness phases progress at one rate, so one number – the progress a phase would have made since the start of
the run – orders their ends: a change of load moves a single timer instead of every execution.
"""

import asyncio
import heapq
from collections.abc import Callable

from gyre.control.base import Ticket
from gyre.core.records import Outcome, Validity
from gyre.simulation.clock import VirtualClock
from gyre.simulation.executions import Graders, completed
from gyre.simulation.workload import HOUR, GroupDraw, WorkloadParams, speed

Phase = asyncio.Future[bool]
"""True: the harness ended by itself; False: it was stopped at its limit."""


class LoadedExecutions:
    def __init__(self, params: WorkloadParams, draw: Callable[[int], GroupDraw]) -> None:
        self._params = params
        self._draw = draw
        self._graders = Graders(VirtualClock(), params.graders)
        self._nodes = 0.0
        self._loop = asyncio.get_running_loop()
        self._progress = 0.0
        self._rate = 0.0
        self._since = self._loop.time()
        self._running = 0
        self._ends: list[tuple[float, int, Phase]] = []
        self._limits: list[tuple[float, int, Phase]] = []
        self._sequence = 0
        self._timer: asyncio.TimerHandle | None = None
        self._dirty = False

    def harness(self, ticket: Ticket) -> str:  # noqa: ARG002
        return "simulated"

    def served_by(self, nodes: float) -> None:
        """From now on this many nodes serve rollouts."""
        self._nodes = nodes
        self._changed()

    def _changed(self) -> None:
        """Recomputes rate and timer once, after everything else that happens at this instant."""
        if not self._dirty:
            self._dirty = True
            self._loop.call_soon(self._rearm)

    async def run(self, ticket: Ticket, terminated: Callable[[], None]) -> Outcome:
        params, draw = self._params, self._draw(ticket.group)
        started = self._loop.time()
        phase: Phase = self._loop.create_future()
        self._advance()
        self._sequence += 1
        heapq.heappush(self._ends, (self._progress + draw.harness_s[ticket.member], self._sequence, phase))
        heapq.heappush(self._limits, (started + params.harness_limit_h * HOUR, self._sequence, phase))
        self._running += 1
        self._changed()
        try:
            own_end = await phase
        finally:
            self._advance()
            self._running -= 1
            self._changed()
        grading = params.evaluation_h * HOUR
        if grading:
            terminated()
        if draw.unresolved[ticket.member]:
            await asyncio.sleep(max(0.0, started + params.overall_limit_h * HOUR - self._loop.time()))
            return completed(ticket, "overall_timeout", Validity.UNRESOLVED)
        waited = await self._graders.grade(grading)
        return completed(ticket, "completed" if own_end else "harness_timeout", grading_s=grading, waited_s=waited)

    def _advance(self) -> None:
        now = self._loop.time()
        self._progress += (now - self._since) * self._rate
        self._since = now

    def _rearm(self) -> None:
        self._dirty = False
        self._advance()
        self._rate = speed(self._params, self._running / self._nodes) if self._nodes else 0.0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for heap in (self._ends, self._limits):
            while heap and heap[0][2].done():
                heapq.heappop(heap)
        if not self._ends:
            return
        when = self._limits[0][0]
        if self._rate:
            when = min(when, self._since + max(0.0, self._ends[0][0] - self._progress) / self._rate)
        self._timer = self._loop.call_at(when, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._advance()
        # The progress of the first end is reached up to rounding when its timer fires.
        tolerance = 1e-9 * max(1.0, self._progress)
        while self._ends and (self._ends[0][2].done() or self._ends[0][0] <= self._progress + tolerance):
            _finish(heapq.heappop(self._ends)[2], True)
        while self._limits and (self._limits[0][2].done() or self._limits[0][0] <= self._since):
            _finish(heapq.heappop(self._limits)[2], False)
        self._changed()


def _finish(phase: Phase, own_end: bool) -> None:
    if not phase.done():
        phase.set_result(own_end)
