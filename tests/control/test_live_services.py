"""Proxy workers, the runner and its shim are started again whenever they end or hang. Real processes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest
from control_worlds import ListJournal, of
from live_fleet import run_config

from gyre.control.live.config import PolicySection, RolloutSection
from gyre.control.live.fleet.fleet import Fleet
from gyre.control.setbacks import RecoverySection
from gyre.core import events as ev
from gyre.core.errors import GyreError
from gyre.launch import LocalLauncher
from gyre.proxy.base import EngineRoute, SessionSpec
from gyre.scheduling.config import SchedulerConfig
from gyre.store import RunDir
from gyre.training.config import ParallelConfig

pytestmark = pytest.mark.live

TINY = Path(__file__).parents[2] / "examples" / "policy" / "tiny"


def writing_to(log: Path) -> int:
    for child in psutil.Process().children(recursive=True):
        if os.path.realpath(f"/proc/{child.pid}/fd/1") == str(log):
            return child.pid
    raise AssertionError(f"no process writes to {log}")


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[tuple[Fleet, ListJournal, Path]]:
    scheduler = SchedulerConfig(groups_per_step=1, executions_per_group=1, cells=1, cell_capacity=1, max_steps=1)
    config = msgspec.structs.replace(
        run_config(TINY, scheduler, ParallelConfig(), RecoverySection()),
        policy=PolicySection(model=TINY, family="qwen3"),
        rollout=RolloutSection(max_context=256, max_new_tokens=32, proxy_workers=2),
    )
    run_dir = RunDir.create((tmp_path / "run").resolve(), "")
    run_dir.open_store().close()
    journal = ListJournal()
    async with LocalLauncher(run_dir.logs) as launcher:
        fleet = Fleet(launcher, config, run_dir, "", journal)
        await fleet.services.start()
        keeping = asyncio.ensure_future(fleet.services.keep())
        yield fleet, journal, run_dir.logs
        keeping.cancel()
        await asyncio.wait({keeping})
        await fleet.close()


@pytest.mark.parametrize("name", ["runner", "proxy-1", "shim"])
async def test_who_does_not_answer_is_ended_and_who_answers_is_not(services, name: str) -> None:
    fleet, journal, logs = services
    await fleet.services.end_silent(30.0)
    assert not journal.events
    os.kill(writing_to(logs / f"{name}.log"), signal.SIGSTOP)
    await fleet.services.end_silent(3.0)
    async with asyncio.timeout(60):
        while not of(journal.events, ev.ProcessRestarted):  # noqa: ASYNC110 — the journal has no event to wait for
            await asyncio.sleep(0.05)
    lost = of(journal.events, ev.ProcessLost)
    assert (lost[0].name, lost[0].detail.split(";")[0]) == (name, f"process {name} did not answer within 3 s")


async def test_a_call_reaches_the_process_that_comes_after_a_lost_one(services) -> None:
    fleet, journal, logs = services
    await fleet.services.proxy.set_routes([EngineRoute(cell=0, address="unix:/none", capacity=4)])
    for worker in (0, 1):
        os.kill(writing_to(logs / f"proxy-{worker}.log"), signal.SIGKILL)
    stats = await fleet.services.proxy.stats()
    assert stats.sessions == 0
    opened = await asyncio.gather(
        *(fleet.services.proxy.open_session(SessionSpec(execution_id=f"g{i}-0", harness="codex")) for i in range(4))
    )
    workers = {Path(access.socket).parts[-3] for access in opened}
    assert workers == {"proxy-0.http", "proxy-1.http"}, "both workers have their sockets again"
    assert {event.name for event in of(journal.events, ev.ProcessLost)} == {"proxy-0", "proxy-1"}
    assert {event.name for event in of(journal.events, ev.ProcessRestarted)} == {"proxy-0", "proxy-1"}


async def test_an_error_of_the_process_itself_is_raised(services) -> None:
    fleet, journal, _ = services
    with pytest.raises(GyreError, match="no session"):
        await fleet.services.proxy.close_session("g0-0")
    assert not journal.events
