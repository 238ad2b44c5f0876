"""`LiveExecutions` over a proxy and a runner that only answer."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from gyre.control.base import Ticket
from gyre.control.live.executions import LiveExecutions
from gyre.core.errors import GyreError
from gyre.core.records import Outcome, SessionAccess, Validity
from gyre.runner.base import Budgets

TICKET = Ticket(execution_id="g0-0", group=0, member=0, query="q", version=0)


def executions(*validities: Validity) -> LiveExecutions:
    ends = [Outcome(execution_id="g0-0", validity=v, reward=0.0, cause="c", message="no disk") for v in validities]
    runner: Any = AsyncMock(wait=AsyncMock(side_effect=[SimpleNamespace(outcome=outcome) for outcome in ends]))
    proxy: Any = AsyncMock(open_session=AsyncMock(return_value=SessionAccess(path="/x", api_key="k")))
    return LiveExecutions(proxy, runner, {"q": Path("/q")}, "h", Budgets(), most_idle=2)


async def test_a_run_in_which_nothing_works_ends_and_says_why() -> None:
    broken = executions(Validity.NO_WORK, Validity.NO_WORK)
    await broken.run(TICKET)
    with pytest.raises(GyreError, match="the last 2 executions did no work at all, g0-0 because no disk"):
        await broken.run(TICKET)


async def test_some_executions_without_work_are_outcomes_like_others() -> None:
    mixed = executions(Validity.NO_WORK, Validity.VALID, Validity.NO_WORK, Validity.UNRESOLVED)
    assert [(await mixed.run(TICKET)).validity for _ in range(3)] == ["no-work", "valid", "no-work"]
