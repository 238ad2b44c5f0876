"""Synthetic executions: each only takes time and then has an outcome."""

import asyncio
import contextlib
from collections.abc import Callable

from gyre.control.base import Ticket
from gyre.core.clock import Clock
from gyre.core.records import Outcome, Validity


def completed(
    ticket: Ticket,
    cause: str = "completed",
    validity: Validity = Validity.VALID,
    *,
    grading_s: float = 0.0,
    waited_s: float = 0.0,
) -> Outcome:
    return Outcome(
        execution_id=ticket.execution_id,
        validity=validity,
        reward=0.0,
        cause=cause,
        grading_s=grading_s,
        waited_s=waited_s,
    )


class Graders:
    """What grades terminated executions, first come, first served."""

    def __init__(self, clock: Clock, at_a_time: int | None = None) -> None:
        """None: nobody waits for one."""
        self._clock = clock
        self._places = asyncio.Semaphore(at_a_time) if at_a_time else contextlib.nullcontext()

    async def grade(self, seconds: float) -> float:
        """Returns when a grader has worked for so long: the seconds for which it had to be waited for."""
        asked = self._clock.now()
        async with self._places:
            waited = self._clock.now() - asked
            await self._clock.sleep(seconds)
        return waited


class FixedExecutions:
    """Durations do not depend on load."""

    def __init__(
        self,
        clock: Clock,
        seconds: Callable[[Ticket], float],
        grading_seconds: Callable[[Ticket], float] = lambda _: 0.0,
        graders: Graders | None = None,
    ) -> None:
        """`seconds` from launch to the end of the harness, `grading_seconds` of a grader afterwards."""
        self._clock = clock
        self._seconds = seconds
        self._grading_seconds = grading_seconds
        self._graders = graders or Graders(clock)

    def harness(self, ticket: Ticket) -> str:  # noqa: ARG002
        return "simulated"

    async def run(self, ticket: Ticket, terminated: Callable[[], None]) -> Outcome:
        await self._clock.sleep(self._seconds(ticket))
        if (grading := self._grading_seconds(ticket)) <= 0:
            return completed(ticket)
        terminated()
        waited = await self._graders.grade(grading)
        return completed(ticket, grading_s=grading, waited_s=waited)
