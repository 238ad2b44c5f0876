"""`gyre plan`: what it searches keeps the devices, what it says is as exact as it is known, what it cannot it says."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.cli.main import main
from gyre.core.errors import ConfigError
from gyre.core.events import Event
from gyre.scheduling.config import SchedulerConfig, capacity, problems
from gyre.simulation.clock import VirtualTimeExceeded
from gyre.simulation.experiment import Layout, simulate
from gyre.simulation.paper.rows import ROWS
from gyre.simulation.planning import candidates, search
from gyre.simulation.planning.command import Request, freshest, plan
from gyre.simulation.planning.report import as_json, changes, duration, percent, picture, table, verdict
from gyre.simulation.planning.search import Measured, Plan, front_of, gain, hours_per_step
from gyre.simulation.planning.world import RecordedWorld, StatedWorkload, StatedWorld, load_workload
from gyre.simulation.recording import read_recording
from gyre.simulation.workload import WorkloadParams

SMALL = SchedulerConfig(
    groups_per_step=4, executions_per_group=4, steps_per_burst=2, extra_dispatch=0.5, cells=4, cell_capacity=16,
    max_steps=6,
)  # fmt: skip
STATED = StatedWorkload(execution_s=1000.0, training_s=60.0)
WORLD = StatedWorld(STATED, SMALL)


def recorded() -> RecordedWorld:
    events: list[Event] = []
    layout = Layout(cell_nodes=0.5, pool_nodes=0.0)
    simulate(SMALL, layout, WorkloadParams(), seed=0, readers=(events.append,))
    return RecordedWorld(read_recording(events), SMALL)


def changed(**values: object) -> SchedulerConfig:
    return msgspec.structs.replace(SMALL, **values)


def measured(staleness: float, *hours: float) -> Measured:
    return Measured(changed(extra_dispatch=staleness, steps_per_burst=1), list(hours))


@given(st.sampled_from([*ROWS, "small"]), st.sampled_from([0.0, 0.5, 1.5, 2.0]), st.booleans())
def test_every_candidate_is_accepted_and_keeps_the_devices(name, bound, predicts):
    own = SMALL if name == "small" else ROWS[name].config(steps=12)
    frontier = [own]
    for _ in range(2):
        frontier = [other for one in frontier[:5] for other in candidates.neighbours(one, own, bound, predicts)]
        for config in frontier:
            assert problems(config) == []
            assert capacity(config, 0) == capacity(own, 0) or own.mode == "async"
            assert candidates.staleness_of(config) <= max(bound, candidates.staleness_of(own))
            assert predicts or config.launch_order == "fifo"
            assert config.mode == own.mode
            assert own.mode == "elastic" or config.cells == own.cells


def test_training_power_stays_when_the_same_devices_make_fewer_cells():
    """Where training is all that takes time, half as many cells of twice the size need as long; recorded or stated."""
    own = changed(supply_wait_s=0.0)
    fewer = msgspec.structs.replace(own, cells=2, cell_capacity=32)
    heavy = StatedWorld(StatedWorkload(execution_s=50.0, training_s=900.0), own)
    events: list[Event] = []
    layout, params = Layout(cell_nodes=0.5, pool_nodes=0), WorkloadParams(work_node_h=9.0)
    simulate(own, layout, params, seed=0, readers=(events.append,))
    for world in (heavy, RecordedWorld(read_recording(events), own)):
        hours = [sum(hours_per_step(world, config, seed) for seed in range(3)) for config in (own, fewer)]
        assert hours[1] == pytest.approx(hours[0], rel=0.25)


def test_seeds_draw_the_recorded_groups_anew():
    world = recorded()
    assert hours_per_step(world, SMALL, 1) != hours_per_step(world, SMALL, 2)
    assert hours_per_step(world, SMALL, 1) == hours_per_step(world, SMALL, 1)


def test_the_front_is_what_nothing_beats_in_both():
    points = [measured(1.0, 5.0), measured(0.0, 9.0), measured(2.0, 5.5), measured(0.5, 9.5), measured(1.5, 4.0)]
    assert [(one.staleness, one.mean) for one in front_of(points)] == [(0.0, 9.0), (1.0, 5.0), (1.5, 4.0)]


def test_gains_are_paired_and_printed_as_exactly_as_they_are_known():
    mean, error = gain(measured(0.0, 1.0, 3.0), measured(1.0, 2.0, 4.0))
    assert (mean, error) == (pytest.approx(-0.375), pytest.approx(0.125))
    assert percent(-0.0347, 0.031) == "-3 ± 3 %"
    assert percent(-0.0347, 0.0041) == "-3.5 ± 0.4 %"
    assert duration(2.345, 0.02) == "2.35 ± 0.02 h"
    assert duration(0.01, 0.001) == "36 ± 4 s"


def made(*front: Measured) -> Plan:
    return Plan(own=front[-1], front=list(front), tried=7, complete=True, seconds=3.0)


def test_a_difference_that_the_seeds_cannot_tell_is_no_advice():
    own = Measured(SMALL, [1.00, 1.10])
    same = Measured(changed(cells=2, cell_capacity=32), [1.05, 1.04])
    assert "more than 2 seeds can tell" in verdict(Plan(own=own, front=[same], tried=2, complete=True, seconds=1.0))
    better = Measured(changed(cells=2, cell_capacity=32), [0.90, 0.99])
    found = Plan(own=own, front=[better], tried=2, complete=True, seconds=1.0)
    assert verdict(found).startswith("Fastest: scheduler.cells=2 scheduler.cell_capacity=32 (-10.0 ± ")
    assert changes(better, own) == {"cells": 2, "cell_capacity": 32}
    assert verdict(made(own)) == "No setting was faster."
    assert "this configuration" in table(found, "something")


def test_a_search_within_its_budget_measures_the_front_on_seeds_that_chose_nothing():
    lines: list[str] = []
    found = search.search(WORLD, SMALL, staleness=1.0, budget_s=4.0, seeds=3, report=lines.append)
    assert 2 <= len(found.own.hours) <= 3
    assert all(len(one.hours) == len(found.own.hours) for one in found.front)
    assert all(one.staleness <= 1.0 for one in found.front)
    assert found.tried >= 1
    fresh = [hours_per_step(WORLD, SMALL, search.FRESH + i) for i in range(len(found.own.hours))]
    assert found.own.hours == fresh
    assert any(line.startswith("measuring") for line in lines)
    written = json.loads(as_json(found, "w"))
    assert written["own"]["gain"] == 0
    assert written["front"][-1]["scheduler"]["steps_per_burst"] >= 1
    assert picture(found, "svg").startswith(b"<?xml")


def test_the_freshest_setting_that_is_fast_enough():
    found = made(measured(0.0, 9.0), measured(1.0, 5.0), measured(1.5, 4.0))
    assert "E[d] = 1 with extra_dispatch = 1" in freshest(found, 5.5)
    assert freshest(found, 3.0) == "No setting takes at most 3.00 per step."


def test_no_hours_are_promised_for_a_workload_that_nobody_stated(tmp_path):
    text = plan(SMALL)
    assert text.startswith("One step trains B = ")
    assert "give a recorded run (--from-run RUN) or a stated workload (--workload FILE" in text
    with pytest.raises(ConfigError, match="nothing was simulated"):
        plan(SMALL, Request(json=tmp_path / "out.json"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"groups_per_step": 10**6}, "12 steps have up to 58000000 executions, and at most 100000 are simulated."),
        ({"extra_dispatch": 1e9}, "executions, and at most 100000 are simulated."),
        ({"steps_per_burst": 10**6}, "1000000 steps have up to"),
        ({"cells": 10**6}, "cells and pool_engines are 1000000 engines, and at most 1000 are simulated."),
        ({"pool_capacity": 10**12, "pool_engines": 10**11}, "cells and pool_engines are 100000000004 engines"),
    ],
)
def test_a_plan_explains_a_configuration_that_is_too_large_to_simulate(change, reason, tmp_path):
    file = tmp_path / "w.toml"
    file.write_text("execution_s = 10.0\ntraining_s = 1.0\n")
    text = plan(changed(**change), Request(workload=file))
    assert text.startswith("One step trains B = ")
    assert reason in text.partition("\n\nNot simulated: ")[2]


def test_a_plan_that_waits_for_ages_is_simulated_and_one_that_waits_for_ever_is_refused():
    assert hours_per_step(WORLD, changed(supply_wait_s=1e7), 0) > 500
    with pytest.raises(VirtualTimeExceeded, match="is not over after 32 years"):
        hours_per_step(WORLD, changed(supply_wait_s=1e30), 0)


def test_the_order_helps_a_stated_workload_only_when_its_executions_can_be_told_apart():
    own = changed(cells=4, cell_capacity=4, launch_order="longest_first", groups_per_step=8)
    blind, seeing = (
        StatedWorld(STATED, own),
        StatedWorld(msgspec.structs.replace(STATED, prediction_log_error=0.0, spread_between_tasks=0.8), own),
    )
    assert (blind.predicts, seeing.predicts) == (False, True)
    fifo = msgspec.structs.replace(own, launch_order="fifo")
    seeds = range(6)
    assert sum(hours_per_step(seeing, own, s) for s in seeds) < sum(hours_per_step(seeing, fifo, s) for s in seeds)


def test_a_workload_file_is_checked(tmp_path):
    file = tmp_path / "w.toml"
    file.write_text("execution_s = 10.0\ntraining_s = 1.0\nspread_between_tasks = 9\n")
    with pytest.raises(ConfigError, match="spread_between_tasks"):
        load_workload(file)
    file.write_text("execution_s = 10.0\n")
    with pytest.raises(ConfigError, match="training_s"):
        load_workload(file)


def test_the_command_plans_a_config_file(tmp_path, capsys):
    file, out = tmp_path / "w.toml", tmp_path / "plan.json"
    file.write_text("execution_s = 100.0\ntraining_s = 5.0\n")
    arguments = ["plan", "examples/quickstart.toml", "--workload", str(file), "--seconds", "1", "--seeds", "2"]
    assert main([*arguments, "--json", str(out), "--plot", str(tmp_path / "plan.svg")]) == 0
    printed = capsys.readouterr()
    assert "± standard error" in printed.out
    assert printed.err == ""
    assert json.loads(out.read_text())["seeds"] == 2
    assert main([*arguments, "--plot", str(tmp_path / "plan.pdf")]) == 2
    assert "no .png or .svg file" in capsys.readouterr().err
