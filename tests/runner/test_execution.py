"""The life of an execution in virtual time: budgets, places that executions wait for, and what the proxy tells."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tiny_tasks import WINDOW, TaskWriter, make_spec

from gyre.core.records import Assessment, CallFacts, Validity
from gyre.evaluation import EvaluationSection, Preserved
from gyre.evaluation.base import GradingLimits
from gyre.runner.base import ExecutionReport
from gyre.runner.budget import Budget
from gyre.runner.config import RunnerConfig
from gyre.runner.execution import Execution
from gyre.runner.failures import Cause, Ending, HarnessRun
from gyre.sandboxes import SandboxSpec
from gyre.simulation.clock import VirtualClock, run_virtual
from gyre.tasks import Task


class World:
    """Harness and grader of executions that only take time."""

    def __init__(self, task: Path, *, harness_s: float = 5.0, grader_s: float = 5.0, **section: Any) -> None:
        self.task = task
        self.harness_s = harness_s
        self.grader_s = grader_s
        self.config = RunnerConfig(
            run_dir="/run", window=WINDOW, evaluation=EvaluationSection(**{"gradings": 1, **section})
        )
        self.graders = asyncio.Semaphore(self.config.evaluation.at_a_time)
        self.clock = VirtualClock()
        self.section = self.config.evaluation
        self.configured = [self]
        self.name, self.uses_grader = "e", True
        self.ending = Ending(cause=Cause.COMPLETED, exit_code=0)
        self.score: float | None = 1.0
        self.at_once = self.most_at_once = 0
        self.gradings: list[float] = []
        self.asked: list[dict[str, float]] = []

    async def run(self, execution_id: str, *_: Any, **budgets: Any) -> HarnessRun:
        self.asked.append({name: budgets[name] for name in ("boot_timeout_s", "timeout_s")})
        await self.clock.sleep(self.harness_s)
        return HarnessRun(ending=self.ending, sandbox=SandboxSpec(name=execution_id, root=Path("/none")))

    async def preserve(self, execution_id: str, sandbox: SandboxSpec, trajectory: dict[str, int]) -> Preserved:
        return Preserved(execution_id=execution_id, sandbox=sandbox, digest="d", trajectory=trajectory)

    async def assess(self, work: Preserved, _: Task, limits: GradingLimits, log: Path) -> Assessment:
        assert log == Path(f"/none/{work.execution_id}.verifier")
        self.asked.append({"boot_timeout_s": limits.boot_timeout_s, "timeout_s": limits.timeout_s})
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.gradings.append(self.clock.now())
        await self.clock.sleep(self.grader_s)
        self.at_once -= 1
        return Assessment(
            execution_id=work.execution_id,
            artifact="a",
            evaluator="e",
            score=self.score,
            valid=self.score is not None,
            designated=False,
            seconds=self.grader_s,
        )

    async def settle(self, *_: Any, **__: Any) -> None:
        return None

    def log(self, execution_id: str, kind: str) -> Path:
        return Path(f"/none/{execution_id}.{kind}")

    def workspace(self, execution_id: str) -> Path:
        return Path("/none", execution_id)

    def execution(self, name: str, **budgets: float) -> Execution:
        spec = make_spec(name, self.task, **budgets)
        me: Any = self
        profile: Any = None
        return Execution(spec, profile, self.config, me, me, self.graders, lambda _: None, self.clock)

    async def closed(
        self, name: str, calls: CallFacts | None = None, **budgets: float
    ) -> tuple[float, ExecutionReport]:
        """When its outcome was known, and its report."""
        execution = self.execution(name, **budgets)
        running = asyncio.ensure_future(execution.run())
        await execution.closed.wait()
        execution.tell(calls or CallFacts())
        report = await running
        return self.clock.now(), report


def test_24_executions_that_end_at_once_are_graded_two_by_two_and_stay_in_budget(
    write_task: TaskWriter,
) -> None:
    task = write_task("x")

    async def main() -> None:
        world = World(task, gradings=2)
        ends = await asyncio.gather(*(world.closed(f"e-{n}", overall_s=20) for n in range(24)))
        assert world.most_at_once == 2
        assert [at for at, _ in ends] == pytest.approx([5.0 + 5.0 * (n // 2 + 1) for n in range(24)])
        outcomes = [report.outcome for _, report in ends]
        assert {outcome.validity for outcome in outcomes} == {Validity.VALID}
        assert [outcome.waited_s for outcome in outcomes] == pytest.approx([5.0 * (n // 2) for n in range(24)])
        assert {outcome.grading_s for outcome in outcomes} == {5.0}

    run_virtual(main())


def test_gradings_at_a_time_are_cores_when_nothing_is_said() -> None:
    import os

    assert EvaluationSection().at_a_time == os.cpu_count()
    assert EvaluationSection(gradings=7).at_a_time == 7


def test_work_itself_spends_the_overall_budget(write_task: TaskWriter) -> None:
    task = write_task("x")

    async def main() -> None:
        world = World(task, harness_s=8.0, grader_s=8.0)
        at, report = await world.closed("e-0", overall_s=15)
        assert (at, report.outcome.cause) == (15.0, "overall_timeout")
        assert report.outcome.validity is Validity.UNRESOLVED

    run_virtual(main())


def test_a_grading_that_fails_is_repeated_after_a_growing_pause_that_holds_no_grader(write_task: TaskWriter) -> None:
    task = write_task("x")

    async def main() -> None:
        world = World(task, harness_s=1.0, grader_s=1.0, attempts=4, retry_s=2.0)
        world.score = None
        first, second = await asyncio.gather(world.closed("e-0", overall_s=30), world.closed("e-1", overall_s=30))
        assert world.most_at_once == 1
        # Each begins 1, 3, 7 and 15 s behind the first: the other one is graded in the pauses.
        assert world.gradings == pytest.approx([1, 2, 4, 5, 9, 10, 18, 19])
        assert first[1].outcome.validity is second[1].outcome.validity is Validity.UNRESOLVED
        assert first[1].outcome.grading_s == 4.0

    run_virtual(main())


def test_grading_begins_when_the_proxy_has_told_of_the_calls(write_task: TaskWriter) -> None:
    task = write_task("x")

    async def main() -> None:
        world = World(task, harness_s=1.0)
        execution = world.execution("e-0", overall_s=20)
        running = asyncio.ensure_future(execution.run())
        await execution.closed.wait()
        await world.clock.sleep(100)
        assert world.gradings == []
        execution.tell(CallFacts(answered=3))
        execution.tell(CallFacts(lost=1))
        report = await running
        assert (report.outcome.validity, report.outcome.calls) == (Validity.VALID, CallFacts(answered=3))

    run_virtual(main())


@pytest.mark.parametrize("cause", [Cause.COMPLETED, Cause.HARNESS_EXIT, Cause.HARNESS_TIMEOUT])
def test_an_execution_whose_calls_were_lost_is_excluded_however_its_harness_ended(
    write_task: TaskWriter, cause: Cause
) -> None:
    task = write_task("x")

    async def main() -> None:
        world = World(task)
        world.ending = Ending(cause=cause, worked=True)
        _, report = await world.closed("e-0", CallFacts(answered=9, lost=1))
        assert (report.outcome.validity, report.outcome.cause) == (Validity.UNRESOLVED, "calls_lost")
        assert world.gradings == []

    run_virtual(main())


def test_a_harness_that_fails_over_an_answer_of_the_policy_is_graded(write_task: TaskWriter) -> None:
    task = write_task("x")

    async def main() -> None:
        world = World(task)
        world.score = 0.0
        world.ending = Ending(cause=Cause.HARNESS_EXIT, exit_code=1, worked=False)
        _, report = await world.closed("e-0", CallFacts(answered=1, cut=1))
        assert (report.outcome.validity, report.outcome.reward) == (Validity.VALID, 0.0)
        _, report = await world.closed("e-1", CallFacts())
        assert report.outcome.validity is Validity.NO_WORK

    run_virtual(main())


def test_the_tasks_own_limits_and_the_budgets_reach_harness_and_grader(write_task: TaskWriter) -> None:
    short = write_task("x", name="short", manifest="[agent]\ntimeout_sec = 3\n[verifier]\ntimeout_sec = 4")
    long = write_task("x", name="long", manifest="[agent]\ntimeout_sec = 999\n[verifier]\ntimeout_sec = 999")

    async def main() -> None:
        for task, harness_s, evaluation_s in ((short, 3, 4), (long, 20, 21)):
            world = World(task, harness_s=0.1)
            await world.closed("e-0", boot_s=7, harness_s=20, evaluation_s=21)
            assert world.asked == [
                {"boot_timeout_s": 7, "timeout_s": harness_s},
                {"boot_timeout_s": 7, "timeout_s": evaluation_s},
            ]

    run_virtual(main())


def test_a_budget_stands_still_in_pauses_and_ends_what_takes_longer() -> None:
    async def spend(seconds: list[tuple[bool, float]]) -> float:
        budget, started = Budget(10.0), loop().time()
        try:
            async with budget:
                for paused, each in seconds:
                    if paused:
                        with budget.paused(), budget.paused():
                            await asyncio.sleep(each)
                    else:
                        await asyncio.sleep(each)
        except TimeoutError:
            return loop().time() - started
        return -1.0

    def loop() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    async def main() -> None:
        assert await spend([(False, 9.0)]) == -1.0
        assert await spend([(False, 11.0)]) == 10.0
        assert await spend([(True, 99.0), (False, 9.0), (True, 99.0)]) == -1.0
        assert await spend([(False, 4.0), (True, 99.0), (False, 7.0)]) == 109.0

    run_virtual(main())


def test_a_grading_is_not_repeated_when_the_overall_budget_would_cut_it_off(write_task: TaskWriter) -> None:
    task = write_task("x")

    async def main() -> None:
        world = World(task, harness_s=5.0, grader_s=10.0, attempts=3, retry_s=0.0)
        world.score = None
        at, report = await world.closed("e-0", evaluation_s=10, overall_s=24)
        # The work is judged by what the start state says, not excluded by a timeout.
        assert (at, report.outcome.cause, len(world.gradings)) == (15.0, "completed", 1)

    run_virtual(main())
