"""A journal as a workload: the run again, exactly, and what-if."""

import msgspec
import pytest

from gyre.control.base import Environment, Ticket
from gyre.control.controller import Controller
from gyre.core.errors import ConfigError
from gyre.core.events import Event, RunStarted
from gyre.scheduling.config import SchedulerConfig
from gyre.simulation.cli import from_run
from gyre.simulation.clock import VirtualClock, run_virtual
from gyre.simulation.executions import FixedExecutions, Graders
from gyre.simulation.recording import load_run, read_recording, replay_run
from gyre.simulation.stats import RunStats
from gyre.simulation.synthetic import CellTimes, MemoryJournal, SimCells, SimMaterializer
from gyre.store import RunDir

CONFIG = SchedulerConfig(
    groups_per_step=3,
    executions_per_group=2,
    steps_per_burst=2,
    extra_dispatch=1.0,
    cells=3,
    cell_capacity=4,
    supply_wait_s=5.0,
    max_steps=6,
)
TIMES = CellTimes(
    to_training_s=2.0,
    to_rollout_s=1.0,
    publication_s=3.0,
    update_s=4.0,
    checkpoint_copy_s=0.5,
    checkpoint_write_s=9.0,
)


class _Queries:
    def query(self, group: int) -> str:
        return f"q{group % 4}"


def recorded() -> list[Event]:
    """A run that the recorder did not make itself: durations and work depend on group and member."""
    events: list[Event] = []

    def seconds(ticket: Ticket) -> float:
        return 10.0 + (ticket.group * 37 + ticket.member * 11) % 50

    async def main() -> None:
        clock = VirtualClock()
        await Controller(
            CONFIG,
            Environment(
                clock,
                _Queries(),
                FixedExecutions(clock, seconds, lambda ticket: 3.0 * (ticket.member + 1), Graders(clock, 2)),
                SimMaterializer(lambda group: [1.0 + group.group % 3, 7.0][: group.group % 3]),
                SimCells(clock, TIMES, nodes=1),
                MemoryJournal(events.append),
            ),
        ).run()

    run_virtual(main())
    return events


def test_the_replay_of_a_run_is_the_run():
    events = recorded()
    recording = read_recording(events)
    assert recording.times == TIMES
    again = replay_run(msgspec.structs.replace(recording, graders=2), CONFIG)
    stats = RunStats()
    for event in events:
        stats.read(event)
    assert again.step_ends == pytest.approx(stats.step_ends)
    assert [cell for cell, _ in again.joins] == [cell for cell, _ in stats.joins]
    assert [at for _, at in again.joins] == pytest.approx([at for _, at in stats.joins])
    assert again.staleness == stats.staleness
    assert again.burst_ends[-1] == pytest.approx(recording.hours)


def test_another_scheduler_meets_the_same_executions():
    recording = read_recording(recorded())
    wide = replay_run(
        recording,
        SchedulerConfig(
            groups_per_step=3,
            executions_per_group=2,
            steps_per_burst=2,
            extra_dispatch=1.0,
            cells=3,
            cell_capacity=40,
            supply_wait_s=5.0,
            max_steps=6,
        ),
    )
    assert wide.burst_ends[-1] < recording.hours
    assert len(wide.step_ends) == 6


def test_a_run_directory_is_compared_with_its_simulation(tmp_path, capsys):
    run = RunDir.create(
        tmp_path / "run",
        "[scheduler]\ngroups_per_step = 3\nexecutions_per_group = 2\nsteps_per_burst = 2\nextra_dispatch = 1.0\n"
        "cells = 3\ncell_capacity = 4\nsupply_wait_s = 5.0\nmax_steps = 99\n[other]\nx = 1\n",
    )
    with run.open_store() as store:
        for event in recorded():
            store.append(event)
    result = from_run(run.root, {"cell_capacity": 40}, tmp_path / "out.json")
    assert result["simulated_hours"] == pytest.approx(result["recorded_hours"])
    assert result["changed_hours"] < result["recorded_hours"]
    assert "6 steps took" in capsys.readouterr().out
    assert (tmp_path / "out.json").read_text().startswith("{")


def test_what_cannot_be_replayed_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not finished a step"):
        read_recording([])
    with pytest.raises(ConfigError, match="was resumed"):
        read_recording([RunStarted(t=0.0, run_id="r", resumed_from=2)])
    with pytest.raises(ConfigError, match=r"executions_per_group = 5 but the recorded groups have 2"):
        replay_run(
            read_recording(recorded()),
            SchedulerConfig(groups_per_step=3, executions_per_group=5, cells=3, cell_capacity=4, max_steps=6),
        )
    empty = RunDir.create(
        tmp_path / "empty",
        "[scheduler]\ngroups_per_step = 3\nexecutions_per_group = 2\ncells = 3\ncell_capacity = 4\nmax_steps = 1\n",
    )
    with pytest.raises(ConfigError, match="empty: The run has not finished a step"):
        load_run(empty.root)
