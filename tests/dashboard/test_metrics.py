"""`/metrics`: Prometheus can read it, its numbers are the journal's, and a scrape reads only what is new."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from recorded_run import HOSTILE, make_run
from synthetic_journal import journal

from gyre.core.events import (
    Event,
    ExecutionClosed,
    ExecutionStarted,
    MicroStepDone,
    ProcessLost,
    ProcessRestarted,
    Published,
    RunStarted,
    StepDone,
    TransitionFinished,
)
from gyre.dashboard.metrics import RunMetrics, families
from gyre.report.summary import summarise
from gyre.report.timeline import ready_groups, role_spans, waterlevels
from gyre.report.totals import Totals
from gyre.store import RunDir, RunStore
from gyre.store.journal import on_one_axis, surviving

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def folded(events: Iterable[Event]) -> Samples:
    totals = Totals()
    for event in events:
        totals.read(event)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families(totals)
        for sample in family.samples
    }


def of(kind: type, events: Iterable[Event]) -> Iterator[Event]:
    return (event for event in events if isinstance(event, kind))


@settings(max_examples=25)
@given(st.integers(1, 400), st.integers(0, 3), st.none() | st.integers(0, 6))
def test_the_numbers_are_those_of_the_journal(length: int, seed: int, resumed_from: int | None) -> None:
    """Also for a journal that ends anywhere, and for a resumption."""
    events = journal(6, seed)[:length]
    if resumed_from is not None:
        events += [RunStarted(t=0.0, run_id="again", resumed_from=resumed_from), *journal(2, seed + 1)[1:30]]
    seen, axis, line = folded(events), on_one_axis(events), surviving(events)
    summary = summarise(events, {}, {})

    closed = Counter((e.validity, e.cause) for e in events if isinstance(e, ExecutionClosed))
    for (validity, cause), count in closed.items():
        assert seen["gyre_executions_closed_total", (("cause", cause), ("outcome", validity))] == count
    assert seen["gyre_executions_started_total", ()] == len(list(of(ExecutionStarted, events)))
    assert seen["gyre_run_starts_total", ()] == summary.parts
    assert seen["gyre_run_unfinished", ()] == (summary.finished is None)

    since = max((index for index, e in enumerate(events) if isinstance(e, RunStarted)), default=0)
    own = [e.step for e in events[since:] if isinstance(e, StepDone)]
    assert seen["gyre_step", ()] == (own[-1] if own else resumed_from or 0)
    assert own[-1:] == [e.step for e in line if isinstance(e, StepDone)][-1:] or not own
    published = [e.version for e in events[since:] if isinstance(e, Published)]
    assert seen["gyre_published_version", ()] == (published[-1] if published else resumed_from or 0)
    done = [e for e in events if isinstance(e, StepDone)]
    assert seen["gyre_step_seconds_count", ()] == len(done)
    assert seen["gyre_group_staleness_sum", ()] == sum(sum(e.staleness) for e in done)
    assert seen["gyre_group_staleness_count", ()] == sum(len(e.staleness) for e in done)
    assert seen["gyre_targets_total", ()] == sum(e.targets for e in done)
    if done:
        assert seen["gyre_reward_mean", ()] == done[-1].reward_mean
    for cell in {e.cell for e in events if isinstance(e, MicroStepDone)}:
        mine = [e for e in events if isinstance(e, MicroStepDone) and e.cell == cell]
        assert seen["gyre_trained_tokens_total", (("cell", str(cell)),)] == sum(e.tokens for e in mine)

    moved = [e for e in events if isinstance(e, TransitionFinished)]
    assert seen["gyre_calls_moved_total", (("kv", "moved"),)] == sum(e.with_kv for e in moved)
    assert seen["gyre_calls_moved_total", (("kv", "recomputed"),)] == sum(e.rerouted - e.with_kv for e in moved)
    assert seen["gyre_calls_total", ()] == summary.proxy.calls
    assert seen["gyre_invariants_broken_total", ()] == len(summary.broken)

    levels = waterlevels(events)
    if levels:
        assert seen["gyre_waterlevel", ()] == levels[-1].waterlevel
        assert seen["gyre_executions_running", ()] == levels[-1].running
        assert seen["gyre_capacity", ()] == levels[-1].capacity
    assert seen["gyre_ready_groups", ()] == ready_groups(axis)[-1][1]
    for cell in role_spans(axis):
        assert sum(seen["gyre_cell_role", (("cell", str(cell)), ("role", r))] for r in ROLES) == 1


ROLES = ("rollout", "training", "transition")


def test_roles_follow_transitions_and_a_resumption_ends_them() -> None:
    events = journal(2)
    finished = [index for index, event in enumerate(events) if isinstance(event, TransitionFinished)]
    training = events[: finished[0] + 1]
    role = lambda seen, name: seen["gyre_cell_role", (("cell", "0"), ("role", name))]  # noqa: E731
    assert role(folded(training[:-1]), "transition") == 1
    assert role(folded(training), "training") == 1
    assert role(folded([*training, RunStarted(t=0.0, run_id="r", resumed_from=0)]), "rollout") == 1


def test_a_resumption_moves_the_step_back_and_no_counter() -> None:
    events = journal(4)
    before, after = folded(events), folded([*events, RunStarted(t=0.0, run_id="r", resumed_from=2)])
    assert (before["gyre_step", ()], after["gyre_step", ()]) == (4, 2)
    assert (before["gyre_published_version", ()], after["gyre_published_version", ()]) == (4, 2)
    assert after["gyre_ready_groups", ()] == 4, "the groups of steps 3 and 4 are ready again"
    for (name, labels), value in before.items():
        if name.endswith(("_total", "_sum", "_count")):
            assert after[name, labels] >= value


def test_losses_are_counted_by_process() -> None:
    seen = folded(
        [
            RunStarted(t=0.0, run_id="r"),
            ProcessLost(t=1.0, name="engine-1", detail="killed"),
            ProcessRestarted(t=2.0, name="engine-1", seconds=1.0),
            ProcessLost(t=3.0, name="engine-1", detail="killed"),
        ]
    )
    assert seen["gyre_processes_lost_total", (("process", "engine-1"),)] == 2
    assert seen["gyre_processes_replaced_total", (("process", "engine-1"),)] == 1


def test_a_scrape_can_be_parsed_whatever_names_are(tmp_path: Path) -> None:
    body, content_type = RunMetrics(make_run(tmp_path / "run").open_store(read_only=True)).scrape("")
    assert content_type.startswith("text/plain")
    seen = samples(body.decode())
    assert seen["gyre_run_info", (("run_id", HOSTILE),)] == 1
    assert seen["gyre_processes_lost_total", (("process", HOSTILE),)] == 1
    assert seen["gyre_executions_closed_total", (("cause", HOSTILE), ("outcome", "no-work"))] == 1


def test_scrapes_read_what_is_new_and_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir.create(tmp_path / "run", "")
    metrics = RunMetrics(run.open_store(read_only=True))
    read: list[int] = []
    events_after = RunStore.events_after

    def counting(store: RunStore, row: int) -> tuple[list[Event], int]:
        events, last = events_after(store, row)
        read.append(len(events))
        return events, last

    monkeypatch.setattr(RunStore, "events_after", counting)
    events = journal(4)
    seen = samples(metrics.scrape("")[0].decode())
    assert seen["gyre_step", ()] == 0
    assert ("gyre_reward_mean", ()) not in seen, "nothing is known of it yet"
    with run.open_store() as store:
        for at in range(0, len(events), 50):
            for event in events[at : at + 50]:
                store.append(event)
            body, _ = metrics.scrape("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
    assert sum(read) == len(events)
    assert samples(metrics.scrape("")[0].decode()) == folded(events)
