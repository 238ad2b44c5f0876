"""`Executions` on a real proxy and runner: session → sandbox and harness → close → assessment → outcome."""

from collections.abc import Callable
from pathlib import Path

from gyre.control.base import Ticket
from gyre.control.live.fleet.lasting import LastingRunner
from gyre.core.errors import GyreError, SessionClosed
from gyre.core.records import CallFacts, Outcome, SessionAccess, Validity
from gyre.proxy.base import ProxyControl, SessionSpec
from gyre.runner.base import Budgets, ExecutionSpec

NOT_THE_POLICYS = ("calls_lost", "runner_error", "quarantined")
"""Causes of unresolved executions that say that nothing works."""


class LiveExecutions:
    def __init__(
        self,
        proxy: ProxyControl,
        runner: LastingRunner,
        tasks: dict[str, Path],
        harness: str,
        budgets: Budgets,
        most_idle: int,
    ) -> None:
        """`most_idle`: executions in a row that may end without any work, before the run does."""
        self._proxy = proxy
        self._runner = runner
        self._tasks = tasks
        self._harness = harness
        self._budgets = budgets
        self._most_idle = most_idle
        self._idle = 0
        self._quarantined: dict[str, str] = {}
        """Tasks that cannot be graded, and why: they are not launched again."""

    def harness(self, ticket: Ticket) -> str:  # noqa: ARG002  one harness runs every execution of a run
        return self._harness

    async def run(self, ticket: Ticket, terminated: Callable[[], None]) -> Outcome:
        """Raises GyreError when nothing works: training would go on with nothing but dummies."""
        outcome = await self._launched(ticket, terminated) if ticket.query not in self._quarantined else None
        if outcome is None:
            outcome = _quarantined(ticket, self._quarantined[ticket.query])
        if outcome.quarantine:
            self._quarantined[ticket.query] = outcome.quarantine
        idle = outcome.validity is Validity.NO_WORK or outcome.cause in NOT_THE_POLICYS or bool(outcome.quarantine)
        self._idle = self._idle + 1 if idle else 0
        if self._idle >= self._most_idle:
            raise GyreError(
                f"the last {self._idle} executions did no work at all, {ticket.execution_id} because "
                f"{outcome.message}; remove the cause, then continue with gyre train --resume"
            )
        return outcome

    async def _launched(self, ticket: Ticket, terminated: Callable[[], None]) -> Outcome:
        execution_id = ticket.execution_id
        try:
            access = await self._proxy.open_session(SessionSpec(execution_id=execution_id, harness=self._harness))
        except SessionClosed:
            # Its harness ended under an earlier controller: the runner, and the shim behind it, know how.
            access = SessionAccess(path="", api_key="")
        spec = ExecutionSpec(
            execution_id=execution_id,
            task=str(self._tasks[ticket.query]),
            harness=self._harness,
            access=access,
            budgets=self._budgets,
        )
        try:
            await self._runner.held(spec)
        except BaseException:
            await self._runner.cancel(execution_id)
            raise
        finally:
            # The record is complete before the outcome exists: nothing is served while the evaluator works.
            session = await self._proxy.close_session(execution_id)
        terminated()
        calls = CallFacts(answered=session.calls, cut=session.cut_answers, lost=session.unserved)
        report = await self._runner.outcome(spec, calls)
        return report.outcome


def _quarantined(ticket: Ticket, reason: str) -> Outcome:
    return Outcome(
        execution_id=ticket.execution_id,
        validity=Validity.UNRESOLVED,
        reward=0.0,
        cause="quarantined",
        message=f"not launched: {reason}",
        quarantine=reason,
    )
