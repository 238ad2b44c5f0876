"""`Executions` on a real proxy and runner: session → sandbox and harness → close → assessment → outcome."""

from collections.abc import Callable
from pathlib import Path

from gyre.control.base import Ticket
from gyre.control.live.lasting import LastingRunner
from gyre.core.errors import GyreError
from gyre.core.records import CallFacts, Outcome, Validity
from gyre.proxy.base import ProxyControl, SessionSpec
from gyre.runner.base import Budgets, ExecutionSpec

NOT_THE_POLICYS = ("calls_lost", "runner_error")
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

    def harness(self, ticket: Ticket) -> str:  # noqa: ARG002  one harness runs every execution of a run
        return self._harness

    async def run(self, ticket: Ticket, terminated: Callable[[], None]) -> Outcome:
        """Raises GyreError when nothing works: training would go on with nothing but dummies."""
        execution_id = ticket.execution_id
        access = await self._proxy.open_session(SessionSpec(execution_id=execution_id, harness=self._harness))
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
        outcome = report.outcome
        idle = outcome.validity is Validity.NO_WORK or outcome.cause in NOT_THE_POLICYS
        self._idle = self._idle + 1 if idle else 0
        if self._idle >= self._most_idle:
            raise GyreError(
                f"the last {self._idle} executions did no work at all, {execution_id} because {outcome.message}; "
                "remove the cause, then continue with gyre train --resume"
            )
        return outcome
