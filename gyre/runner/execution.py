"""The life of one execution on its node: boot → harness → closed → evaluation → outcome, each with its own budget."""

import asyncio
import logging
from collections.abc import Callable

from gyre.core.errors import TaskError
from gyre.core.records import Assessment
from gyre.evaluation import Evaluator
from gyre.harnesses import HarnessProfile
from gyre.runner.base import ExecutionReport, ExecutionSpec
from gyre.runner.config import RunnerConfig
from gyre.runner.failures import POLICIES, Cause, Ending, designate, worth_grading
from gyre.runner.harness import HarnessRun, HarnessRunner
from gyre.sandboxes import SandboxSpec
from gyre.tasks import Task, load_task

log = logging.getLogger(__name__)


class Execution:
    """Run `run()` as a task; `cancel()` ends it early with an outcome, cancelling the task ends it without one."""

    def __init__(
        self,
        spec: ExecutionSpec,
        profile: HarnessProfile,
        config: RunnerConfig,
        harness: HarnessRunner,
        evaluator: Evaluator,
        evaluations: asyncio.Semaphore,
        record: Callable[[Assessment], None],
    ) -> None:
        self.spec = spec
        self.closed = asyncio.Event()
        """Set when the harness has ended."""
        self._profile = profile
        self._config = config
        self._harness = harness
        self._evaluator = evaluator
        self._evaluations = evaluations
        self._record = record
        self._work: asyncio.Future[ExecutionReport] | None = None
        self._cancelled = False
        self._run: HarnessRun | None = None
        self._assessments: list[Assessment] = []

    def cancel(self) -> None:
        self._cancelled = True
        if self._work is not None:
            self._work.cancel()

    async def run(self) -> ExecutionReport:
        """Returns when the outcome is known; nothing of the execution runs any more."""
        overall_s = self.spec.budgets.overall_s
        self._work = asyncio.ensure_future(self._phases())
        if self._cancelled:
            self._work.cancel()
        try:
            async with asyncio.timeout(overall_s):
                return await self._work
        except TimeoutError:
            return self._report(
                Ending(cause=Cause.OVERALL_TIMEOUT, message=f"the execution did not end within {overall_s:g} s")
            )
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
            return self._report(Ending(cause=Cause.CANCELLED, message="the controller cancelled the execution"))
        except Exception as error:
            # Whatever an execution contains, it ends itself at most, never the run.
            log.exception("execution %s failed in the runner", self.spec.execution_id)
            return self._report(
                Ending(
                    cause=Cause.RUNNER_ERROR, message=f"the runner failed, see its log: {type(error).__name__}: {error}"
                )
            )
        finally:
            self.closed.set()

    async def _phases(self) -> ExecutionReport:
        try:
            task = load_task(self.spec.task)
        except TaskError as error:
            return self._report(Ending(cause=Cause.BOOT_FAILED, message=str(error), worked=False))
        for _ in range(self._config.boot_attempts):
            self._run = await self._harness.run(
                self.spec.execution_id,
                task,
                self._profile,
                self.spec.access,
                boot_timeout_s=self.spec.budgets.boot_s,
                timeout_s=min(self.spec.budgets.harness_s, task.agent_timeout_s or float("inf")),
            )
            if not POLICIES[self._run.ending.cause].retry:
                break
        assert self._run is not None
        self.closed.set()
        if worth_grading(self._run.ending):
            await self._evaluate(task, self._run.sandbox)
        return self._report(self._run.ending)

    async def _evaluate(self, task: Task, sandbox: SandboxSpec) -> None:
        execution_id = self.spec.execution_id
        preserved = await self._evaluator.preserve(execution_id, sandbox)
        async with self._evaluations:
            for _ in range(self._config.evaluation_attempts):
                assessment = await self._evaluator.assess(
                    preserved,
                    task,
                    timeout_s=min(self.spec.budgets.evaluation_s, task.verifier_timeout_s or float("inf")),
                    log=self._harness.log(execution_id, "verifier"),
                )
                self._assessments.append(assessment)
                self._record(assessment)
                if assessment.valid:
                    return

    def _report(self, ending: Ending) -> ExecutionReport:
        run = self._run
        return ExecutionReport(
            outcome=designate(self.spec.execution_id, ending, self._assessments),
            workspace=str(self._harness.workspace(self.spec.execution_id) / "app"),
            boot_s=run.boot_s if run else 0.0,
            harness_s=run.harness_s if run else 0.0,
            evaluation_s=sum(assessment.seconds for assessment in self._assessments),
        )
