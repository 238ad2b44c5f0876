"""Synthetic executions: each only takes time and then has an outcome."""

from collections.abc import Callable

from gyre.control.base import Ticket
from gyre.core.clock import Clock
from gyre.core.records import Outcome, Validity


def completed(ticket: Ticket, cause: str = "completed", validity: Validity = Validity.VALID) -> Outcome:
    return Outcome(execution_id=ticket.execution_id, validity=validity, reward=0.0, cause=cause)


class FixedExecutions:
    """Durations do not depend on load."""

    def __init__(self, clock: Clock, seconds: Callable[[Ticket], float]) -> None:
        self._clock = clock
        self._seconds = seconds

    def harness(self, ticket: Ticket) -> str:  # noqa: ARG002
        return "simulated"

    async def run(self, ticket: Ticket) -> Outcome:
        await self._clock.sleep(self._seconds(ticket))
        return completed(ticket)
