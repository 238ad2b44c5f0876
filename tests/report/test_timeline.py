"""Role spans tile the run, whatever the journal holds."""

from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st
from synthetic_journal import K, journal

from gyre.core.events import (
    ExecutionClosed,
    ExecutionStarted,
    ExecutionTerminated,
    GroupReady,
    LedgerSampled,
    RunStarted,
    StepDone,
    TransitionFinished,
)
from gyre.report.timeline import ready_groups, role_spans, waterlevels
from gyre.store.journal import on_one_axis


@settings(max_examples=25)
@example(29, 0)
@given(st.integers(1, 300), st.integers(0, 5))
def test_spans_tile_the_run(length: int, seed: int) -> None:
    """Also for a journal that ends anywhere, and when a second part follows."""
    part = journal(6, seed)[:length]
    events = on_one_axis([*part, RunStarted(t=0.0, run_id="again"), *journal(2, seed)[1:]])
    spans = role_spans(events)
    assert list(spans) == list(range(K))
    for of_cell in spans.values():
        assert of_cell[0].start == events[0].t
        assert of_cell[-1].end == max(event.t for event in events)
        for left, right in pairwise(of_cell):
            assert left.end == right.start
            assert left.activity != right.activity


def test_spans_say_what_the_transitions_said() -> None:
    events = journal(4)
    spans = role_spans(events)
    for event in events:
        if isinstance(event, TransitionFinished):
            inside = [s for s in spans[event.cell] if s.start == event.t]
            assert [s.activity for s in inside] in ([event.target], []), "a role that lasts no time has no span"
            switch = [s for s in spans[event.cell] if s.end == event.t]
            assert [s.activity for s in switch] == ["transition"]

    def training(cell: int) -> float:
        return sum(span.end - span.start for span in spans[cell] if span.activity == "training")

    assert [(span.start, span.end, span.activity) for span in spans[2]] == [(0.0, events[-1].t, "rollout")]
    assert training(0) > training(1) > 0


def test_an_empty_journal_has_no_cells() -> None:
    assert role_spans([]) == {}
    assert waterlevels([]) == []


def test_waterlevels_are_d_minus_f() -> None:
    levels = waterlevels(journal(2))
    assert levels[0].waterlevel == 16
    assert levels[-1].waterlevel == 0
    assert all(level.running <= level.waterlevel for level in levels)


def test_waterlevel_falls_with_every_end_between_samples() -> None:
    sample = LedgerSampled(t=0.0, d=4, p=0, f=0, capacity=2, ready=0, roles=["rollout"])
    started = ExecutionStarted(t=1.0, execution_id="g0-0", group=0, query="q", harness="h")
    ended = ExecutionTerminated(t=2.0, execution_id="g0-0", group=0, seconds=1.0)
    graded = ExecutionClosed(
        t=3.0, execution_id="g0-0", group=0, validity="valid", reward=1.0, cause="completed", seconds=2.0
    )
    levels = waterlevels([started, sample, started, ended, graded])
    assert [(level.t, level.waterlevel, level.running) for level in levels] == [(0.0, 4, 0), (1.0, 4, 1), (2.0, 3, 0)]


def test_ready_groups_wait_for_their_step_and_come_back_when_it_is_lost() -> None:
    events = [event for event in journal(4) if isinstance(event, RunStarted | GroupReady | StepDone)]
    curve = ready_groups(events)
    assert len(curve) == len(events) + 1
    assert curve[-1][1] == 0
    assert min(count for _, count in curve) == 0
    resumed = [*events, RunStarted(t=99.0, run_id="r", resumed_from=2), events[-1]]
    assert [count for _, count in ready_groups(resumed)[-2:]] == [4, 2]
    assert ready_groups([]) == []
