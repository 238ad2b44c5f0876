"""`LiveExecutions` over a proxy and a runner that only answer."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from gyre.control.base import Ticket
from gyre.control.live.executions import LiveExecutions
from gyre.core.errors import GyreError, SessionClosed
from gyre.core.records import CallFacts, Outcome, SessionAccess, Validity
from gyre.proxy.base import SessionSummary
from gyre.runner.base import Budgets, ExecutionSpec

TICKET = Ticket(execution_id="g0-0", group=0, member=0, query="q", version=0)


def executions(*validities: Validity) -> LiveExecutions:
    ends = [Outcome(execution_id="g0-0", validity=v, reward=0.0, cause="c", message="no disk") for v in validities]
    runner: Any = AsyncMock(outcome=AsyncMock(side_effect=[SimpleNamespace(outcome=outcome) for outcome in ends]))
    proxy: Any = AsyncMock(open_session=AsyncMock(return_value=SessionAccess(path="/x", api_key="k")))
    return LiveExecutions(proxy, runner, {"q": Path("/q")}, "h", Budgets(), most_idle=2)


async def test_a_run_in_which_nothing_works_ends_and_says_why() -> None:
    broken = executions(Validity.NO_WORK, Validity.NO_WORK)
    await broken.run(TICKET, lambda: None)
    with pytest.raises(GyreError, match="the last 2 executions did no work at all, g0-0 because no disk"):
        await broken.run(TICKET, lambda: None)


async def test_some_executions_without_work_are_outcomes_like_others() -> None:
    mixed = executions(Validity.NO_WORK, Validity.VALID, Validity.NO_WORK, Validity.UNRESOLVED)
    assert [(await mixed.run(TICKET, lambda: None)).validity for _ in range(3)] == ["no-work", "valid", "no-work"]


async def test_the_place_is_free_when_the_session_is_closed_and_the_runner_hears_of_the_calls() -> None:
    order: list[str] = []
    told: list[CallFacts] = []
    summary = SessionSummary(
        execution_id="g0-0",
        calls=5,
        orphans=0,
        retries_attached=0,
        retries_replayed=0,
        drift={},
        unserved=2,
        cut_answers=1,
    )

    async def close_session(_: str) -> SessionSummary:
        order.append("session closed")
        return summary

    async def wait(_: ExecutionSpec, calls: CallFacts) -> SimpleNamespace:
        order.append("graded")
        told.append(calls)
        return SimpleNamespace(outcome=Outcome(execution_id="g0-0", validity=Validity.VALID, reward=1.0, cause="c"))

    live = executions(Validity.VALID)
    live._proxy.close_session, live._runner.outcome = close_session, wait  # type: ignore[method-assign]
    await live.run(TICKET, lambda: order.append("terminated"))
    assert order == ["session closed", "terminated", "graded"]
    assert told == [CallFacts(answered=5, cut=1, lost=2)]


async def test_executions_without_the_policy_count_as_nothing_works() -> None:
    lost = Outcome(
        execution_id="g0-0", validity=Validity.UNRESOLVED, reward=0.0, cause="calls_lost", message="no engine"
    )
    live = executions(Validity.VALID)
    live._runner.outcome = AsyncMock(return_value=SimpleNamespace(outcome=lost))  # type: ignore[method-assign]
    await live.run(TICKET, lambda: None)
    with pytest.raises(GyreError, match="did no work at all, g0-0 because no engine"):
        await live.run(TICKET, lambda: None)


async def test_a_task_whose_grader_is_broken_is_not_launched_again() -> None:
    broken = Outcome(
        execution_id="g0-0", validity=Validity.UNRESOLVED, reward=0.0, cause="completed", quarantine="it lacks pytest"
    )
    live = executions(Validity.VALID)
    live._most_idle = 3
    live._runner.outcome = AsyncMock(return_value=SimpleNamespace(outcome=broken))  # type: ignore[method-assign]
    await live.run(TICKET, lambda: None)
    again = await live.run(TICKET, lambda: None)
    assert (again.validity, again.cause, again.message) == (
        "unresolved",
        "quarantined",
        "not launched: it lacks pytest",
    )
    assert live._proxy.open_session.await_count == 1  # type: ignore[attr-defined]
    with pytest.raises(GyreError, match="did no work at all, g0-0 because not launched: it lacks pytest"):
        await live.run(TICKET, lambda: None)


async def test_an_execution_that_outlived_its_controller_after_its_end_is_only_asked_for_its_outcome() -> None:
    """Its session is closed, and none opens under its name again."""
    live = executions(Validity.VALID)
    live._proxy.open_session.side_effect = SessionClosed("execution g0-0 has ended")  # type: ignore[attr-defined]
    outcome = await live.run(TICKET, lambda: None)
    assert outcome.validity is Validity.VALID
    live._proxy.close_session.assert_awaited_with("g0-0")  # type: ignore[attr-defined]
