"""Journals of resumed runs: one time axis, and only what the surviving line of checkpoints did."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_journal import journal

from gyre.core.events import (
    CellJoined,
    CellLeft,
    CheckpointSaved,
    Event,
    LogprobGapGrew,
    MicroStepDone,
    MicroStepsReturned,
    PublicationProbed,
    Published,
    RunStarted,
    StepDone,
)
from gyre.store.journal import on_one_axis, surviving

_OF_A_VERSION = (
    CellJoined, CellLeft, CheckpointSaved, LogprobGapGrew, MicroStepDone, MicroStepsReturned, PublicationProbed,
    Published, StepDone,
)  # fmt: skip


def steps_of(events: list[Event]) -> list[int]:
    return [event.step for event in events if isinstance(event, StepDone)]


def resumed(first: list[Event], version: int) -> list[Event]:
    """A second part that starts its clock again and repeats what came after `version`."""
    second = journal(8, seed=1)[1:]
    tail = [event for event in second if not isinstance(event, StepDone | Published) or _of(event) > version]
    return [*first, RunStarted(t=0.0, run_id="synthetic", resumed_from=version or None), *tail]


def _of(event: StepDone | Published) -> int:
    return event.step if isinstance(event, StepDone) else event.version


def test_a_run_without_resumption_is_left_alone() -> None:
    events = journal(4)
    assert on_one_axis(events) == events
    assert surviving(events) == events


@settings(max_examples=20)
@given(st.integers(0, 3), st.integers(1, 200))
def test_every_step_survives_once(bursts: int, cut: int) -> None:
    """The first part is cut anywhere after its checkpoint; its own later steps are overtaken by the second part's."""
    version = 2 * bursts
    whole = journal(8)
    saved = next((i for i, e in enumerate(whole) if isinstance(e, Published) and e.version == version), 0)
    first = whole[: max(1, saved + 1, cut)]
    line = surviving(resumed(first, version))
    assert steps_of(line) == list(range(1, 9))
    assert [event.version for event in line if isinstance(event, Published)] == [2, 4, 6, 8]


def test_a_run_resumed_without_a_checkpoint_starts_over() -> None:
    assert steps_of(surviving(resumed(journal(4), 0))) == list(range(1, 9))


def test_going_back_to_the_start_keeps_what_belongs_to_no_version() -> None:
    """Dispatches, executions and losses are facts, whatever the weights went back to."""
    first = journal(4)
    facts = [event for event in first if not isinstance(event, _OF_A_VERSION)]
    assert len({type(event) for event in facts}) > 5
    line = surviving([*first, RunStarted(t=0.0, run_id="synthetic", resumed_from=None)])
    assert line[:-1] == facts


def test_two_resumptions() -> None:
    twice = [*resumed(journal(4), 4)[:-1], RunStarted(t=0.0, run_id="synthetic", resumed_from=2), *journal(4)[1:3]]
    assert steps_of(surviving(twice)) == [1, 2]


def test_times_never_go_back_and_durations_are_kept() -> None:
    events = resumed(journal(4), 4)
    shifted = on_one_axis(events)
    restart = next(i for i, event in enumerate(events) if i and isinstance(event, RunStarted))
    times = [event.t for event in shifted]
    assert all(times[restart] >= t for t in times[:restart])
    offset = times[restart] - events[restart].t
    assert offset > 0
    for before, after in zip(events[restart:], shifted[restart:], strict=True):
        assert abs(after.t - before.t - offset) < 1e-9
        assert msgspec.structs.replace(after, t=before.t) == before


def test_a_part_whose_clock_went_on_is_not_shifted() -> None:
    first = journal(4)
    later = RunStarted(t=first[-1].t + 100, run_id="synthetic", resumed_from=4)
    assert on_one_axis([*first, later])[-1] == later
