"""Table 2 and Figure 8: shapes are the paper's, methods are at one staleness, variations change one thing."""

import json

import msgspec
import pytest

from gyre.cli.main import main
from gyre.core.events import CellJoined, CellLeft, MicroStepDone, StepDone
from gyre.scheduling.config import capacity, problems
from gyre.scheduling.staleness import expected_staleness
from gyre.simulation.paper import cli, comparisons
from gyre.simulation.paper.comparisons import FIGURE8, METHODS, TABLE2, arrangement, compare, with_factors
from gyre.simulation.stats import RunStats

SMALL = msgspec.structs.replace(
    TABLE2[0], cells=2, cell_nodes=2, capacity=32, groups_per_step=4, steps=2, staleness=0.5, name="small"
)


@pytest.mark.parametrize("comparison", [*TABLE2, *FIGURE8], ids=lambda one: one.name)
def test_methods_have_the_same_nodes_and_staleness(comparison):
    nodes = comparison.cells * comparison.cell_nodes
    for method in METHODS:
        config, layout = arrangement(comparison, method)
        assert problems(config) == []
        assert config.cells * layout.cell_nodes + layout.pool_nodes == nodes
        mean = expected_staleness(extra_dispatch=config.extra_dispatch, steps_per_burst=config.steps_per_burst)
        assert mean == comparison.staleness
        assert config.max_steps == comparison.steps
    gyre, _ = arrangement(comparison, "gyre")
    assert capacity(gyre, 0) == {24: 1152, 192: 384}[nodes]


def test_a_comparison_has_ratios_of_the_hours_it_has():
    heavy = msgspec.structs.replace(SMALL, name="heavy", changes=SMALL.changes | {"work_node_h": 3.0})
    found = compare([heavy, SMALL], 2)
    assert list(found) == ["heavy", "small"]
    assert found["heavy"]["hours"]["gyre"] > found["small"]["hours"]["gyre"]
    for entry in found.values():
        assert 0.5 < entry["over_async"] < 5
        assert entry["over_colocate"] == pytest.approx(entry["hours"]["colocate"] / entry["hours"]["gyre"], rel=0.2)
        assert 0 <= entry["lost_queries"] <= 1


def test_a_variation_multiplies_what_it_names_and_nothing_else():
    for variation, factors in comparisons.VARIATIONS.items():
        other = with_factors(TABLE2[0], factors)
        if "training_nodes" in factors:
            assert other.training_nodes == pytest.approx(TABLE2[0].training_nodes * 2 / 3)
            assert other.changes == TABLE2[0].changes
            continue
        assert other.training_nodes == TABLE2[0].training_nodes
        assert {key for key in other.changes if other.changes[key] != TABLE2[0].changes.get(key)} == set(factors), (
            variation
        )
    assert with_factors(TABLE2[0], {"work_node_h": 2.0}).changes["work_node_h"] == 2 * TABLE2[0].changes["work_node_h"]


def test_the_commands_print_beside_the_paper(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "TABLE2", [SMALL])
    monkeypatch.setattr(comparisons, "VARIATIONS", {"no imbalance": {"imbalance": 0.0}})
    out = tmp_path / "out.json"
    assert main(["simulate", "table2", "--seeds", "1", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "[1.57] over async" in printed
    assert "no imbalance" in printed
    assert set(json.loads(out.read_text())) == {"comparisons", "sensitivity", "seeds"}
    assert main(["simulate", "table1", "--seeds", "1", "--set", "imbalence=0"]) == 2
    assert "imbalence" in capsys.readouterr().err


def test_idle_of_the_training_role_is_what_no_micro_step_fills():
    stats = RunStats()
    for event in (
        CellJoined(t=0.0, cell=0, step=1, version=0, late=False),
        CellJoined(t=1800.0, cell=1, step=1, version=0, late=True),
        MicroStepDone(t=3600.0, cell=0, step=1, micro_step="a", groups=[0], tokens=0, targets=0, seconds=1800.0),
        CellLeft(t=3600.0, cell=1, step=1, micro_steps=0),
    ):
        stats.read(event)
    step = StepDone(
        t=7200.0, step=1, groups=[], staleness=[], reward_mean=0.0, loss=0.0, grad_norm=0.0, cells=[0],
        logprob_gap_count=0, logprob_gap_mean=0.0, logprob_gap_max=0.0, clipped_executions=0, executions=0, targets=0,
        seconds=0.0,
    )  # fmt: skip
    stats.read(step)
    assert stats.training_hours == pytest.approx(2.5)
    assert stats.busy_hours == pytest.approx(0.5)
