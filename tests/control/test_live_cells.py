"""Cells of two pipeline stages on real processes: a burst with a satellite that joins, updates, publishes, returns."""

import asyncio
from pathlib import Path

import pytest
from live_fleet import make_policy_model, micro_step, run_config, running

from gyre.control.base import WorkerId, WorkerLost
from gyre.control.live.fleet.fleet import Fleet
from gyre.control.setbacks import RecoverySection
from gyre.core.errors import CheckpointFailed, PeerLost
from gyre.scheduling.config import SchedulerConfig
from gyre.training.config import ParallelConfig

pytestmark = pytest.mark.live


def snapshots(fleet: Fleet) -> set[int]:
    """Versions that the core holds for readers."""
    files = Path(fleet.transport_root(0), "trainer-0").glob("*.safetensors")
    return {int(file.name[1:].partition("-")[0]) for file in files}


async def test_a_burst_with_a_satellite_keeps_engines_and_core_equal(tmp_path: Path) -> None:
    scheduler = SchedulerConfig(groups_per_step=1, executions_per_group=1, cells=2, cell_capacity=4, max_steps=1)
    config = run_config(
        make_policy_model(tmp_path / "model"), scheduler, ParallelConfig(pipeline=2), RecoverySection(call_s=60.0)
    )
    async with running(config, tmp_path) as (fleet, cells):
        await asyncio.gather(cells.enter_rollout(0, 0), cells.enter_rollout(1, 0))
        await cells.set_admitting([1])
        assert (await cells.leave_rollout(0)).calls_in_flight == 0
        await cells.enter_training(0, 0)
        # As many micro-steps under way as the cell has stages.
        await asyncio.gather(*(cells.train(0, micro_step(name, 1)) for name in "abc"))

        # The satellite joins the batch under way and pulls the core's weights of this step.
        await cells.set_admitting([])
        await cells.leave_rollout(1)
        await cells.enter_training(1, 0)
        await cells.train(1, micro_step("d", 2))
        stats = await cells.update(2)
        assert stats.version == 1
        assert stats.grad_norm > 0

        # Second step of the burst on the new weights, then the satellite returns and the core publishes.
        await asyncio.gather(cells.enter_training(0, 1), cells.enter_training(1, 1))
        await cells.train(1, micro_step("e", 3))
        assert (await cells.update(2)).version == 2
        assert snapshots(fleet) == {0, 1}
        await cells.leave_training(1)
        await cells.enter_rollout(1, 0)
        await cells.checkpoint(2)
        saving = asyncio.ensure_future(cells.checkpoint_written(2))
        publication = await cells.publish(2, [1])
        assert [probe.cell for probe in publication.probes] == [1]
        assert snapshots(fleet) == {2}
        assert publication.probes[0].tokens > 0
        assert publication.probes[0].logprob_gap_max <= 1e-3
        assert Path(await saving).is_dir()

        # The core returns with the published weights and samples from exactly them.
        await cells.leave_training(0)
        await cells.enter_rollout(0, 2)
        await cells.set_admitting([0, 1])

        # The end of one rank is the end of its cell: all ranks are replaced, and training goes on.
        satellite = WorkerId("trainer", 1)
        lost = fleet.worker(satellite).connection.stub
        await fleet.worker(satellite).processes[1].stop(0.0)
        assert (await cells.next_failure()).worker == satellite
        await cells.replace(satellite)
        with pytest.raises(PeerLost):
            await lost.wake()
        await cells.enter_training(0, 2)
        await cells.enter_training(1, 2)
        await cells.train(1, micro_step("f", 4))
        assert (await cells.update(2)).version == 3

        # A disk that takes no checkpoint is no fault of the core.
        (tmp_path / "run" / "checkpoints").rename(tmp_path / "moved")
        (tmp_path / "run" / "checkpoints").write_text("")
        await cells.checkpoint(3)
        with pytest.raises(CheckpointFailed, match=r"v000003 could not be written .*Not a directory"):
            await cells.checkpoint_written(3)
        await cells.enter_training(0, 3)
        with pytest.raises(WorkerLost, match="engine-7: not running"):
            await cells.enter_rollout(7, 2)
