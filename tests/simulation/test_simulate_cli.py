"""What the `gyre simulate` functions print and write; small runs."""

import json

import msgspec
import pytest

from gyre.cli.main import main
from gyre.core.errors import ConfigError
from gyre.core.events import Event
from gyre.report.timeline import ready_groups
from gyre.simulation.experiment import Layout, simulate
from gyre.simulation.paper import beyond, cli, table1
from gyre.simulation.paper.rows import ROWS, run_row
from gyre.simulation.workload import WorkloadParams

PARAMS = WorkloadParams()


def test_table1_has_the_promised_shape(tmp_path, monkeypatch, capsys):
    measured: list[int] = []

    def few(params, seeds, steps=12):
        measured.append(steps)
        return table1_of(params, seeds, steps=1)

    table1_of = table1.table1
    monkeypatch.setattr(cli.experiments, "table1", few)
    some = {name: ROWS[name] for name in ("A0", "E0", "E2")}
    monkeypatch.setattr(cli.experiments, "ROWS", some)
    out = tmp_path / "table1.json"
    cli.table1(1, out)
    written = json.loads(out.read_text())
    assert measured == [12]
    assert list(written["rows"]) == list(some)
    assert written["rows"]["E0"]["ratio_to_E0"] == 1.0
    assert written["rows"]["A0"] | {"hours": 0, "sd": 0, "ratio_to_E0": 0, "idle": 0} == {
        "hours": 0,
        "idle": 0,
        "sd": 0,
        "paper": 25.08,
        "ratio_to_E0": 0,
    }
    assert msgspec.convert({k: v for k, v in written["params"].items() if k != "seeds"}, WorkloadParams) == PARAMS
    assert "E2  elastic   on" in capsys.readouterr().out


def test_speedups_compare_three_methods_at_two_targets():
    result = table1.speedups(PARAMS, seeds=1, steps=1)
    assert list(result) == ["1.0", "1.5"]
    for entry in result.values():
        assert entry["over_async"] == pytest.approx(entry["hours"]["async"] / entry["hours"]["gyre"])
    for target, rows in table1.SPEEDUPS.items():
        assert {row.extra_dispatch + (row.steps_per_burst - 1) / 2 for row in rows.values()} == {target}


def test_trace_writes_the_promised_keys(tmp_path, capsys):
    path, out = tmp_path / "trace.json", tmp_path / "out.json"
    path.write_text(json.dumps({"dur": [[1.0, 2.0]] * 4, "work": [0.5] * 4, "params": {"groups_per_step": 2}}))
    cli.trace(path, "C0", 4, out)
    written = json.loads(out.read_text())
    assert list(written) == ["step_end_hours", "burst_end_hours", "joins", "staleness_per_step"]
    assert written["staleness_per_step"] == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert written["joins"][0][0] == 0
    assert "C0: 4 steps end after" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no row"):
        cli.trace(path, "X", 4, out)


def test_an_oracle_sorts_by_the_slowest_execution_and_noise_changes_the_order():
    workload = beyond.Workload(PARAMS, 0, 4)
    entries = [(group, f"q{group}") for group in range(20)]
    slowest = [max(workload.draw(group).harness_s) for group in range(20)]
    oracle = beyond.predicted_order(PARAMS, 0, 4, 0.0).arrange(entries)
    assert [slowest[group] for group, _ in oracle] == sorted(slowest, reverse=True)
    assert beyond.predicted_order(PARAMS, 0, 4, None).arrange(entries) == entries
    assert beyond.predicted_order(PARAMS, 0, 4, 0.6).arrange(entries) not in (entries, oracle)


def test_no_row_beats_the_work_bound():
    bound = beyond.work_bound(PARAMS, ROWS["E0"], 0, steps=3)
    assert 0 < bound < run_row(ROWS["E0"], PARAMS, seed=0, steps=3).step_ends[-1]


def test_gains_are_paired_by_seed():
    assert beyond.paired_gain([1.0, 3.0], [2.0, 4.0]) == (pytest.approx(-0.375), pytest.approx(0.125))
    assert beyond.paired_gain([1.0], [2.0]) == (-0.5, 0.0)


def test_longest_first_is_faster_and_consumes_the_same_versions():
    row = ROWS["E0"]
    fifo = row.config(steps=6)
    layout = Layout(cell_nodes=row.nodes, pool_nodes=row.pool_nodes)
    order = beyond.predicted_order(PARAMS, 0, fifo.executions_per_group, 0.0)
    longest = msgspec.structs.replace(fifo, launch_order="longest_first")
    base, other = (
        simulate(fifo, layout, PARAMS, seed=0),
        simulate(longest, layout, PARAMS, seed=0, order=order),
    )
    assert other.step_ends[-1] < base.step_ends[-1]
    assert [sum(step) for step in other.staleness] == [sum(step) for step in base.staleness]


def test_what_a_command_cannot_do_is_one_sentence(tmp_path, capsys):
    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit, match="2"):
            raise SystemExit(main(["simulate", *arguments]))
        return capsys.readouterr().err

    trace = tmp_path / "trace.json"
    trace.write_text('{"dur": [[1.0]], "work": [0.1], "params": {"groups_per_step": 2}}')
    missing = tmp_path / "missing" / "out"
    assert "out cannot be written (No such file" in refused("trace", str(trace), "--row", "E0", "--json", str(missing))
    assert "argument --steps: 0 is less than 1" in refused("trace", str(trace), "--row", "E0", "--steps", "0")
    assert "argument --seeds: -1 is less than 1" in refused("table1", "--seeds", "-1")
    assert "out is no .png or .svg file" in refused("picture", "--plot", str(missing))
    assert main(["replay", str(missing), "--harness", "claude_code", "--tokenizer", "."]) == 2
    assert "out cannot be read (No such file" in capsys.readouterr().err


def test_the_picture_of_a_row_is_written(tmp_path):
    cli.picture("E0", tmp_path / "e0.svg", steps=1)
    assert (tmp_path / "e0.svg").read_text().startswith("<?xml")
    events: list[Event] = []
    run_row(ROWS["E0"], PARAMS, seed=0, steps=2, readers=(events.append,))
    curve = ready_groups(events)
    assert curve[0] == (0.0, 0)
    assert min(count for _, count in curve) >= 0
    assert max(count for _, count in curve) >= 32
