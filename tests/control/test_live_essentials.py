"""A proxy worker or a runner that hangs is ended, so that the run can go back to its checkpoint. Real processes."""

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import psutil
import pytest
from live_fleet import run_config

from gyre.control.live.config import PolicySection, RecoverySection, RolloutSection
from gyre.control.live.processes import Fleet
from gyre.launch import LocalLauncher
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


@pytest.mark.parametrize("name", ["runner", "proxy-1"])
async def test_who_does_not_answer_is_ended_and_who_answers_is_not(name: str, tmp_path: Path) -> None:
    scheduler = SchedulerConfig(groups_per_step=1, executions_per_group=1, cells=1, cell_capacity=1, max_steps=1)
    config = msgspec.structs.replace(
        run_config(TINY, scheduler, ParallelConfig(), RecoverySection()),
        policy=PolicySection(model=TINY, family="qwen3"),
        rollout=RolloutSection(max_context=256, max_new_tokens=32, proxy_workers=2),
    )
    run_dir = RunDir.create((tmp_path / "run").resolve(), "")
    run_dir.open_store().close()
    async with LocalLauncher(run_dir.logs) as launcher:
        fleet = Fleet(launcher, config, run_dir, "")
        await fleet.start_essentials()
        ended = asyncio.ensure_future(fleet.essential_end())
        await fleet.end_silent(30.0)
        assert not ended.done()
        os.kill(writing_to(run_dir.logs / f"{name}.log"), signal.SIGSTOP)
        await fleet.end_silent(3.0)
        who, how = await ended
        assert (who, how.split(";")[0]) == (name, f"process {name} did not answer within 3 s")
        await fleet.close()
