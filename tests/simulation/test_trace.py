"""`gyre simulate trace` against the reference simulator, and its input checks."""

import json
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_simulator import Reference

from gyre.core.errors import ConfigError
from gyre.simulation.paper.rows import ROWS, find_row
from gyre.simulation.paper.trace import Trace, TraceParams, load_trace, replay, trace_config, trace_row


def reference(trace: Trace, row, steps: int):
    row = trace_row(trace, row)
    config = trace_config(trace, row, steps)
    return Reference(
        trace.dur,
        trace.work,
        steps,
        mode=config.mode,
        streaming=config.streaming,
        extra_dispatch=config.extra_dispatch,
        steps_per_burst=config.steps_per_burst,
        cells=config.cells,
        cell_capacity=config.cell_capacity,
        pool_capacity=config.pool_capacity,
        nodes=row.nodes,
        groups_per_step=config.groups_per_step,
        tau=trace.params.supply_wait_s,
        rho=trace.params.min_supply,
        grading=trace.params.grading_s,
        graders=trace.params.graders,
    ).run()


def check(trace: Trace, name: str, steps: int) -> None:
    row = ROWS[name]
    ours, theirs = replay(trace, row, steps), reference(trace, row, steps)
    assert [hours * 3600 for hours in ours.step_end_hours] == pytest.approx(theirs["steps"], abs=1e-3)
    assert [hours * 3600 for hours in ours.burst_end_hours] == pytest.approx(theirs["bursts"], abs=1e-3)
    assert [cell for cell, _ in ours.joins] == [cell for cell, _ in theirs["joins"]]
    assert [hours * 3600 for _, hours in ours.joins] == pytest.approx([at for _, at in theirs["joins"]], abs=1e-3)
    assert ours.staleness_per_step == theirs["staleness"]


@pytest.mark.parametrize("name", ["A0", "A3", "C0", "C1", "C2", "E0", "E1", "E2"])
def test_paper_scale_rows_agree_with_the_reference(name):
    rng = random.Random(7)
    dur = [[min(4.2, rng.lognormvariate(0.5, 0.4)) for _ in range(16)] for _ in range(240)]
    check(Trace(dur=dur, work=[rng.uniform(0.2, 0.6) for _ in dur]), name, 6)


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(ROWS)),
    st.integers(0, 10_000),
    st.integers(1, 7),
    st.sampled_from([2, 4, 6]),
    st.sampled_from([0.0, 60.0, 600.0]),
    st.floats(0.02, 1.0),
    st.sampled_from([0.0, 0.0, 30.0, 1000.0]),
    st.sampled_from([None, 1, 3]),
)
def test_small_traces_agree_with_the_reference(name, seed, steps, batch, tau, scale, grading, graders):
    rng = random.Random(seed)
    members = rng.randint(1, 4)
    dur = [[rng.lognormvariate(0.0, 0.8) * scale for _ in range(members)] for _ in range(40)]
    work = [rng.choice([0.0, rng.uniform(0.0, 0.5)]) for _ in dur]
    params = TraceParams(
        groups_per_step=batch,
        supply_wait_s=tau,
        executions_per_node=rng.choice([1, 2, 3]),
        min_supply=rng.choice([0.125, 0.5]),
        grading_s=grading,
        graders=graders,
    )
    check(Trace(dur=dur, work=work, params=params), name, steps)


def test_a_trace_file_is_read_with_its_overrides(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(
        json.dumps(
            {
                "dur": [[1.0, 2.0]],
                "work": [0.5],
                "params": {"groups_per_step": 2, "steps_per_burst": 1, "extra_dispatch": 1.0, "cells": 1},
            }
        )
    )
    result = replay(load_trace(path), find_row("E0"), 2)
    # Both groups are ready after two hours; the only cell joins one τ and one switch later, 450 s each.
    first = 2.0 + (60 + 8.52) / 3600 + 2 * 0.5 / 4
    assert result.step_end_hours[0] == pytest.approx(first)
    assert result.burst_end_hours[0] == pytest.approx(first + 60 / 3600)
    assert result.staleness_per_step == [[0, 0], [1, 1]]


def test_graded_executions_hold_no_place_and_their_groups_wait_for_a_grader():
    # Four executions of an hour on a capacity of two: the second pair starts while the first is graded.
    trace = Trace(
        dur=[[1.0, 1.0]],
        work=[0.0],
        params=TraceParams(
            groups_per_step=2,
            steps_per_burst=1,
            extra_dispatch=0.0,
            cells=1,
            pool_nodes=0,
            nodes_per_cell=1,
            executions_per_node=2,
            supply_wait_s=0.0,
            min_supply=1.0,
            grading_s=1800.0,
        ),
    )
    ready = {
        graders: replay(
            Trace(dur=trace.dur, work=trace.work, params=msgspec.structs.replace(trace.params, graders=graders)),
            find_row("E0"),
            1,
        ).step_end_hours[0]
        for graders in (None, 2, 1)
    }
    moved = 8.52 / 3600
    # One grader takes the four one after the other, from the end of the first pair on.
    assert ready == pytest.approx({None: 2.5 + moved, 2: 2.5 + moved, 1: 3.0 + moved})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "malformed|truncated"),
        ('{"dur": [], "work": []}', "dur is empty"),
        ('{"dur": [[1.0], [1.0, 2.0]], "work": [1, 1]}', r"dur\[1\] has 2 executions, dur\[0\] has 1"),
        ('{"dur": [[-1.0]], "work": [1]}', "not a duration"),
        ('{"dur": [[1.0]], "work": [1, 2]}', "work has 2 entries for 1 groups"),
        ('{"dur": [[1.0]], "work": [-2]}', "work holds a value"),
        ('{"dur": [[1.0]], "work": [1], "params": {"b": 1}}', "unknown field `b`"),
        ('{"dur": [[1e9]], "work": [1]}', "from 0 to 1e\\+06 hours"),
        ('{"dur": [[0]], "work": [1], "params": {"dispatch": "continuous"}}', "dur is 0 everywhere"),
        ('{"dur": [[1]], "work": [1], "params": {"micro_steps": 0}}', "Expected `int` >= 1"),
        ('{"dur": [[1]], "work": [1], "params": {"to_rollout_s": -1}}', "Expected `float` >= 0"),
    ],
)
def test_a_broken_trace_file_is_one_sentence_with_the_file(tmp_path, content, says):
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=says) as caught:
        load_trace(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_an_unknown_row_and_an_impossible_override_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_trace(tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"no row 'E9'.*A0, A1"):
        find_row("E9")
    with pytest.raises(ConfigError, match=r"params\.extra_dispatch = 0\.3"):
        replay(Trace(dur=[[1.0]], work=[1.0], params=TraceParams(extra_dispatch=0.3)), ROWS["E0"], 1)
