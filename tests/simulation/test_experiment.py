"""Simulated runs of the modelled workload: determinism, memory, staleness of both kinds of dispatch, plan."""

import itertools
import random
import statistics

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.core.events import Event, GroupDispatched, LedgerSampled, Published, StepDone
from gyre.scheduling.config import SchedulerConfig
from gyre.scheduling.staleness import expected_staleness
from gyre.simulation.experiment import Drawn, Layout, simulate
from gyre.simulation.paper.rows import ROWS
from gyre.simulation.predictions import Predicted
from gyre.simulation.workload import Workload, WorkloadParams

SMALL = SchedulerConfig(
    groups_per_step=4,
    executions_per_group=4,
    steps_per_burst=2,
    extra_dispatch=0.5,
    cells=3,
    cell_capacity=16,
    max_steps=6,
)
LAYOUT = Layout(cell_nodes=0.5, pool_nodes=1.0)
PARAMS = WorkloadParams()


def test_a_run_is_deterministic_for_its_seed():
    def run(seed: int) -> list[Event]:
        events: list[Event] = []
        simulate(SMALL, LAYOUT, PARAMS, seed=seed, readers=(events.append,))
        return events

    first = run(3)
    assert first == run(3)
    assert first != run(4)


def test_draws_live_only_as_long_as_their_group(monkeypatch):
    sizes = []
    drop = Drawn.costs

    def costs(self, group):
        sizes.append(len(self._live))
        return drop(self, group)

    monkeypatch.setattr(Drawn, "costs", costs)
    simulate(msgspec.structs.replace(SMALL, max_steps=40), LAYOUT, PARAMS, seed=0)
    assert len(sizes) == 160
    assert max(sizes) <= SMALL.depth


@pytest.mark.parametrize("mu", [1, 2])
def test_continuous_dispatch_costs_mu_and_the_ready_groups_of_staleness(mu):
    """E_c − E_b = μ + R/B in the long run, R counted just after each publication."""
    config = SchedulerConfig(
        mode="async",
        groups_per_step=4,
        executions_per_group=2,
        steps_per_burst=mu,
        extra_dispatch=1.0,
        cells=1,
        cell_capacity=0,
        pool_capacity=12,
        max_steps=120,
    )
    quick = msgspec.structs.replace(PARAMS, work_node_h=0.02)
    means, ready = {}, []
    for dispatch in ("boundary", "continuous"):
        events: list[Event] = []
        simulate(msgspec.structs.replace(config, dispatch=dispatch), LAYOUT, quick, seed=1, readers=(events.append,))
        steps = [event for event in events if isinstance(event, StepDone)]
        means[dispatch] = statistics.mean(d for step in steps[24:] for d in step.staleness)
        if dispatch == "continuous":
            after = [later for earlier, later in itertools.pairwise(events) if isinstance(earlier, Published)]
            ready = [event.ready for event in after if isinstance(event, LedgerSampled)]
    assert means["boundary"] == pytest.approx(expected_staleness(extra_dispatch=1.0, steps_per_burst=mu), rel=0.02)
    assert len(ready) == 120 // mu - 1
    excess = mu + statistics.mean(ready[20:]) / 4
    assert means["continuous"] - means["boundary"] == pytest.approx(excess, rel=0.03)


@settings(max_examples=20)
@given(
    st.sampled_from(["elastic", "async"]),
    st.integers(1, 4),
    st.integers(0, 6),
    st.sampled_from(["boundary", "continuous"]),
    st.integers(0, 10_000),
)
def test_longest_first_keeps_the_staleness_identity(mode, mu, extra, dispatch, seed):
    """Σd = μΣP_j + nBμ(μ−1)/2 − A_n after every publication, recounted from the journal; any predictions."""
    cells, pool = (2, 8) if mode == "async" else (4, 24)
    config = SchedulerConfig(
        mode=mode, groups_per_step=4, executions_per_group=2, steps_per_burst=mu, extra_dispatch=extra / 4,
        cells=cells, cell_capacity=16, pool_capacity=pool, max_steps=4 * mu,
        dispatch=dispatch, launch_order="longest_first",
    )  # fmt: skip
    events: list[Event] = []
    order = Predicted(lambda query: random.Random(f"{seed}/{query}").random())
    simulate(config, LAYOUT, PARAMS, seed=seed, order=order, readers=(events.append,))
    outstanding: dict[int, int] = {}
    consumed = survivors = bursts = 0
    for event in events:
        if isinstance(event, GroupDispatched):
            outstanding[event.group] = event.version
        elif isinstance(event, StepDone):
            consumed += sum(event.step - 1 - outstanding.pop(group) for group in event.groups)
        elif isinstance(event, Published):
            bursts += 1
            survivors += len(outstanding)
            ages = sum(event.version - version for version in outstanding.values())
            assert consumed == mu * survivors + bursts * 4 * mu * (mu - 1) // 2 - ages
    assert bursts == 4


def test_paper_statistics_and_rows_are_those_of_the_paper():
    assert ROWS["E0"].config(steps=12).cell_capacity == 144
    assert ROWS["C1"].config(steps=12).pool_capacity == 144
    assert {row.pool_nodes + row.cells * row.nodes for row in ROWS.values()} == {32}
    assert {
        expected_staleness(extra_dispatch=row.extra_dispatch, steps_per_burst=row.steps_per_burst)
        for row in ROWS.values()
    } == {1.5}


def test_workload_draws_do_not_depend_on_the_order_of_asking():
    drawn = Drawn(Workload(PARAMS, 0, 4))
    late = drawn.get(9)
    assert drawn.get(9) is late
    assert Workload(PARAMS, 0, 4).draw(9) == late
