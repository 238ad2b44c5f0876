"""A weight sender is part of its engine: started, lost and replaced with it."""

import os
import signal
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from live_fleet import make_policy_model, run_config, running

from gyre.control.base import WorkerId
from gyre.control.setbacks import RecoverySection
from gyre.core.errors import GyreError
from gyre.engines.sglang.config import SglangSection
from gyre.scheduling.config import SchedulerConfig
from gyre.training.config import ParallelConfig

pytestmark = pytest.mark.live

SERVER = Path(__file__).parents[1] / "engines/receiving_sglang.py"
SCHEDULER = SchedulerConfig(
    mode="async",
    groups_per_step=2,
    executions_per_group=1,
    steps_per_burst=1,
    cells=1,
    cell_capacity=0,
    pool_capacity=4,
    max_steps=1,
)
ENGINE = WorkerId("engine", 1)


def interpreter(root: Path) -> Path:
    """Stands in for the interpreter of SGLang's environment."""
    script = root / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {SERVER} "$@"\n')
    script.chmod(0o755)
    return script


def processes() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True) if child.status() != "zombie"}


async def test_a_lost_sender_is_replaced_with_its_engine_and_a_failed_start_leaves_none(tmp_path):
    python = interpreter(tmp_path)
    config = run_config(make_policy_model(tmp_path / "model"), SCHEDULER, ParallelConfig(), RecoverySection())
    section = SglangSection(python=str(python), device="cpu", dtype="float32", weights="broadcast")
    async with running(msgspec.structs.replace(config, engine=section), tmp_path) as (fleet, cells):
        await cells.enter_rollout(1, 0)
        engine, sender = fleet.worker(ENGINE).processes
        assert (engine.spec.name, sender.spec.name) == ("engine-1", "engine-1-sender")
        assert (await fleet.worker(ENGINE).connection.stub.status()).version == 0

        os.kill(sender.pid, signal.SIGKILL)
        failure = await cells.next_failure()
        assert failure.worker == ENGINE
        assert "engine-1-sender ended (killed by signal 9)" in failure.detail
        await cells.replace(ENGINE)
        assert not psutil.pid_exists(engine.pid)
        await cells.enter_rollout(1, 0)
        assert (await fleet.worker(ENGINE).connection.stub.status()).version == 0

        await fleet.kill(fleet.worker(ENGINE))
        before = processes()
        python.write_text("#!/bin/sh\nexit 1\n")
        with pytest.raises(GyreError, match=r"engine-1\.2 ended while starting"):
            await fleet.start_worker(ENGINE)
        assert processes() == before
