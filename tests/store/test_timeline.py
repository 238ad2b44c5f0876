"""Role spans tile the run, whatever the journal holds."""

from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st
from synthetic_journal import K, journal

from gyre.core.events import RunStarted, TransitionFinished
from gyre.store.journal import on_one_axis
from gyre.store.timeline import role_spans, seconds_by_role, waterlevels


@settings(max_examples=25, deadline=None)
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
    seconds = seconds_by_role(spans)
    assert seconds[2] == {"rollout": events[-1].t, "training": 0}
    assert seconds[0]["training"] > seconds[1]["training"] > 0


def test_an_empty_journal_has_no_cells() -> None:
    assert role_spans([]) == {}
    assert waterlevels([]) == []


def test_waterlevels_are_d_minus_f() -> None:
    levels = waterlevels(journal(2))
    assert levels[0].waterlevel == 16
    assert levels[-1].waterlevel == 0
    assert all(level.running <= level.waterlevel for level in levels)
