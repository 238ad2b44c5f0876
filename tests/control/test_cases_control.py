"""Public cases of batch arithmetic, in the real controller over random worlds (T23, T24)."""

import pytest
from control_worlds import World, of
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.core import events as ev
from gyre.scheduling.config import SchedulerConfig


def config(**changes) -> SchedulerConfig:
    base = {
        "groups_per_step": 3,
        "executions_per_group": 4,
        "steps_per_burst": 2,
        "extra_dispatch": 0.0,
        "cells": 3,
        "cell_capacity": 12,
        "supply_wait_s": 0.0,
        "min_supply": 0.34,
        "max_steps": 6,
    }
    return SchedulerConfig(**(base | changes))


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.5, 1.0]), st.integers(1, 4))
def test_T23_steps_are_batches_of_B_groups_whatever_their_micro_steps(seed, no_signal, batch):
    """Groups give any number of micro-steps, none too; an update is taken per B groups and never per micro-step."""
    world = World(config(groups_per_step=batch), seed, no_signal=no_signal)
    assert world.run()
    steps = of(world.journal.events, ev.StepDone)
    assert [step.step for step in steps] == [1, 2, 3, 4, 5, 6]
    assert all(len(set(step.groups)) == batch for step in steps)
    groups = [group for step in steps for group in step.groups]
    assert len(groups) == len(set(groups))
    per_group = dict.fromkeys(groups, 0)
    for event in of(world.journal.events, ev.MicroStepDone):
        for group in event.groups:
            per_group[group] += 1
    if no_signal == 0.5 and batch > 1:
        assert len(set(per_group.values())) > 1


@pytest.mark.parametrize("seed", range(3))
def test_T24_a_cell_with_zero_micro_steps_takes_part(seed):
    """Most groups have no signal, so cells that joined find no work in a batch and still sum their zeros."""
    world = World(config(), seed, no_signal=0.8)
    assert world.run()
    events = world.journal.events
    worked = {(event.step, event.cell) for event in of(events, ev.MicroStepDone)}
    steps = of(events, ev.StepDone)
    assert len(steps) == 6
    assert any((step.step, cell) not in worked for step in steps for cell in step.cells)
    trained = {group for event in of(events, ev.MicroStepDone) for group in event.groups}
    assert trained < {group for step in steps for group in step.groups}
