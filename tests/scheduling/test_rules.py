import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.core.errors import InvariantViolation
from gyre.scheduling.config import SchedulerConfig
from gyre.scheduling.modes import ModeDecision, make_mode
from gyre.scheduling.rules import Situation, SupplyTimer, batch_may_open
from gyre.scheduling.staleness import StalenessAccount, expected_staleness


def config(**changes) -> SchedulerConfig:
    base = {
        "groups_per_step": 32,
        "executions_per_group": 16,
        "steps_per_burst": 3,
        "extra_dispatch": 0.5,
        "cells": 8,
        "cell_capacity": 144,
        "max_steps": 12,
    }
    return SchedulerConfig(**(base | changes))


def situation(**changes) -> Situation:
    base = {"now": 100.0, "waterlevel": 0, "training": 0, "ready": 32, "needed": 32, "supply_since": 0.0}
    return Situation(**(base | changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"waterlevel": 1008}, ModeDecision(1)),
        ({"waterlevel": 1009}, ModeDecision(0)),
        ({"waterlevel": 864, "training": 1}, ModeDecision(2)),
        ({"waterlevel": 865, "training": 1}, ModeDecision(1)),
        ({"training": 7}, ModeDecision(8)),
        ({"training": 8}, ModeDecision(8)),
        ({"supply_since": 40.0}, ModeDecision(1)),
        ({"supply_since": 41.0}, ModeDecision(0, 101.0)),
        ({"supply_since": None}, ModeDecision(0)),
        ({"supply_since": 41.0, "waterlevel": 1009}, ModeDecision(0)),
    ],
)
def test_elastic_joins_by_waterlevel_and_supply(changes, expected):
    assert make_mode(config()).decide(situation(**changes)) == expected


@pytest.mark.parametrize(
    ("changes", "stays"),
    [
        ({"waterlevel": 496, "ready": 4}, True),
        ({"waterlevel": 497, "ready": 4}, False),
        ({"waterlevel": 496, "ready": 3}, False),
        ({"waterlevel": 496, "ready": 4, "supply_since": None}, True),
    ],
)
def test_the_core_stays_only_with_supply_and_room_for_the_next_dispatch(changes, stays):
    """w + μNB ≤ C_s + (K−1)C_e = 1008 with μNB = 512; no timer."""
    mode = make_mode(config(steps_per_burst=1, extra_dispatch=1.5))
    assert mode.decide(situation(boundary=True, training=1, **changes)).training == int(stays)


def test_baselines_are_the_same_rules_on_other_cells():
    colocate = make_mode(config(mode="colocate", cells=1, cell_capacity=1152, extra_dispatch=0.0))
    assert colocate.decide(situation(waterlevel=1)).training == 0
    assert colocate.decide(situation(waterlevel=0)).training == 1
    assert colocate.decide(situation(waterlevel=0, boundary=True)).training == 0
    coarse = make_mode(config(mode="coarse", cells=1, cell_capacity=1008, pool_capacity=144))
    assert coarse.decide(situation(waterlevel=145)).training == 0
    assert coarse.decide(situation(waterlevel=144)).training == 1
    fixed = make_mode(config(mode="async", cells=2, cell_capacity=0, pool_capacity=576))
    assert fixed.decide(situation(waterlevel=5000, supply_since=None)).training == 2
    assert not fixed.releases


@pytest.mark.parametrize(
    ("streaming", "ready", "first", "steps", "opens"),
    [(True, 0, True, 3, True), (False, 95, True, 3, False), (False, 96, True, 3, True), (False, 0, False, 3, True)],
)
def test_without_streaming_the_first_batch_waits_for_the_whole_burst(streaming, ready, first, steps, opens):
    assert batch_may_open(config(streaming=streaming), ready, first, steps) is opens


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from(["observe", "reset"]), st.booleans()), max_size=40))
def test_the_supply_timer_is_the_time_of_unbroken_supply_since_the_last_reset(events):
    timer = SupplyTimer()
    now, history = 0, []
    for wait, kind, holds in events:
        now += wait
        getattr(timer, kind)(now, holds)
        history.append((now, kind, holds))
        start = None
        for time, what, held in reversed(history):
            if not held:
                break
            start = time
            if what == "reset":
                break
        assert timer.since == start


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.randoms(use_true_random=False))
def test_staleness_identity_for_random_consumption(mu, batch, bursts, random):
    """Groups of any age are consumed in any order; only the counts enter the identity."""
    pending = [-random.randrange(3) for _ in range(mu * batch)]
    account = StalenessAccount(steps_per_burst=mu, batch_groups=batch, ages=[-version for version in pending])
    version = 0
    for _ in range(bursts):
        pending += [version] * (mu * batch + random.randrange(3))
        for i in range(mu):
            random.shuffle(pending)
            taken, pending = pending[:batch], pending[batch:]
            account.step([version + i - dispatched for dispatched in taken])
        version += mu
        account.publication([version - dispatched for dispatched in pending])
    assert account.groups == bursts * mu * batch


def test_a_wrong_staleness_breaks_the_identity():
    account = StalenessAccount(steps_per_burst=1, batch_groups=1)
    account.step([1])
    with pytest.raises(InvariantViolation, match="identity broken after 1 bursts"):
        account.publication([])


def test_mean_staleness_of_the_paper():
    assert (
        expected_staleness(extra_dispatch=1.5, steps_per_burst=1)
        == expected_staleness(extra_dispatch=0.5, steps_per_burst=3)
        == expected_staleness(extra_dispatch=0, steps_per_burst=4)
    )
