"""Summaries are computed from events, outcomes and trees alone."""

import json

import pytest
from synthetic_journal import B, N, journal

from gyre.core.events import (
    CellJoined,
    Event,
    ExecutionStarted,
    GroupDispatched,
    InvariantBroken,
    LedgerSampled,
    MicroStepDone,
    MicroStepsReturned,
    ProxySampled,
    RunFinished,
    RunStarted,
    StepDone,
    TransitionFinished,
)
from gyre.core.records import Outcome, RoleClass, Validity
from gyre.report.summary import ExecutionSummary, RunSummary, as_json, summarise
from gyre.report.tables import executions_table, outcome_sentence
from gyre.report.trees import LeafSummary, TreeSummary


def test_a_complete_run() -> None:
    events = journal(12)
    summary = summarise(events, {}, {})
    assert [step.step for step in summary.steps] == list(range(1, 13))
    assert summary.staleness_mean == 0.5
    assert len(summary.executions) == 12 * B * N
    assert {execution.outcome for execution in summary.executions} == {Validity.VALID}
    assert summary.finished == events[-1]
    assert (summary.run_id, summary.parts) == ("synthetic", 1)
    assert summary.invariants_ok
    # Six bursts; cell 1 joins each first step late and does its second micro-step.
    assert [(join.cell, join.step, join.micro_steps) for join in summary.joins] == [(1, s, 1) for s in range(1, 12, 2)]
    assert len(summary.transitions) == 6 * 4
    assert summary.initial_reward == pytest.approx(0.3, abs=0.15)


def test_the_json_document_has_exactly_the_promised_keys() -> None:
    outcome = Outcome(execution_id="0-0", validity=Validity.NO_WORK, reward=0.0, cause="boot_failed")
    tree = TreeSummary(calls=3, nodes=3, leaves=[LeafSummary(role=RoleClass.MAIN, calls=3, targets=40)])
    document = json.loads(json.dumps(as_json(summarise(journal(4), {"0-0": outcome}, {"0-0": tree}))))
    assert set(document) >= set(RunSummary.__struct_fields__)
    assert set(document["steps"][0]) >= {*StepDone.__struct_fields__, "staleness_mean"}
    assert set(document["transitions"][0]) >= set(TransitionFinished.__struct_fields__)
    assert set(document["executions"][0]) >= set(ExecutionSummary.__struct_fields__)
    assert (document["transitions"][0]["from"], document["transitions"][0]["to"]) == ("rollout", "training")
    assert document["joins"][0] == {"cell": 1, "step": 1, "micro_steps": 1}
    first = document["executions"][0]
    assert (first["id"], first["query"], first["harness"]) == ("0-0", "task-0", "claude")
    assert (first["outcome"], first["reward"], first["calls"], first["nodes"]) == ("no-work", 0.0, 3, 3)
    assert first["leaves"] == [{"role": "main", "targets": 40}]
    assert document["invariants_ok"] is True
    assert document["harness_errors_from_transitions"] == 0


@pytest.mark.parametrize(
    ("d", "p", "f", "capacity", "ok"),
    [(8, 4, 2, 2, True), (8, 4, 2, 1, False), (8, 9, 8, 8, False), (8, 4, 5, 8, False), (8, 4, -1, 8, False)],
)
def test_counters_are_checked_again(d: int, p: int, f: int, capacity: int, ok: bool) -> None:
    sample = LedgerSampled(t=1.0, d=d, p=p, f=f, capacity=capacity, ready=0, roles=["rollout"])
    summary = summarise([RunStarted(t=0.0, run_id="r"), sample], {}, {})
    assert summary.invariants_ok is ok
    assert len(summary.broken) == (not ok)


def test_what_the_run_reported_breaks_the_invariants() -> None:
    start = RunStarted(t=0.0, run_id="r")
    assert not summarise([start, InvariantBroken(t=1.0, name="n", detail="d")], {}, {}).invariants_ok
    mismatch = ProxySampled(t=1.0, calls=3, prompt_mismatches=1, harness_errors_from_transitions=0, retries=0)
    assert not summarise([start, mismatch], {}, {}).invariants_ok


def test_proxy_counters_add_up_over_restarts() -> None:
    def sample(calls: int, errors: int) -> ProxySampled:
        return ProxySampled(
            t=1.0, calls=calls, prompt_mismatches=0, harness_errors_from_transitions=errors, retries=calls
        )

    samples: list[Event] = [sample(5, 0), sample(9, 1), sample(2, 0), sample(4, 2)]
    proxy = summarise(samples, {}, {}).proxy
    assert (proxy.calls, proxy.retries, proxy.harness_errors_from_transitions) == (13, 13, 3)


def test_a_run_that_was_killed_or_just_began() -> None:
    assert summarise([], {}, {}).steps == []
    cut = journal(4)[:-1]
    assert summarise(cut, {}, {}).finished is None
    first_start = next(i for i, event in enumerate(cut) if isinstance(event, ExecutionStarted))
    running = summarise(cut[: first_start + 1], {}, {}).executions[0]
    assert (running.outcome, running.version, running.tree) == (None, 0, TreeSummary())
    assert as_json(summarise(cut[: first_start + 1], {}, {}))["executions"][0]["outcome"] == "running"


def test_after_a_resumption_the_end_is_open_and_overtaken_steps_are_gone() -> None:
    events = [*journal(4), RunStarted(t=0.0, run_id="again", resumed_from=2)]
    summary = summarise(events, {}, {})
    assert summary.finished is None
    assert (summary.run_id, summary.parts) == ("again", 2)
    assert [step.step for step in summary.steps] == [1, 2]
    assert [join.step for join in summary.joins] == [1]
    assert len(summary.executions) == 4 * B * N, "executions are facts: they stay"
    done = summarise([*events, RunFinished(t=1.0, reason="interrupted", detail="Ctrl-C")], {}, {})
    assert done.finished is not None
    assert done.finished.reason == "interrupted"


def test_a_cell_that_is_lost_and_joins_again_did_only_what_was_not_returned() -> None:
    def done(t: float) -> Event:
        return MicroStepDone(t=t, cell=1, step=1, micro_step=f"g0/{t}", groups=[0], tokens=1, targets=1, seconds=1.0)

    joined = CellJoined(t=1.0, cell=1, step=1, version=0, late=True)
    returned = MicroStepsReturned(t=4.0, cell=1, step=1, micro_steps=2)
    events: list[Event] = [joined, done(2.0), done(3.0), returned, joined, done(5.0)]
    assert [join.micro_steps for join in summarise(events, {}, {}).joins] == [0, 1]


def test_only_late_satellites_count_as_joins() -> None:
    def joined(cell: int, late: bool) -> CellJoined:
        return CellJoined(t=1.0, cell=cell, step=1, version=0, late=late)

    summary = summarise([joined(0, True), joined(1, False), joined(2, True)], {}, {})
    assert [(join.cell, join.micro_steps) for join in summary.joins] == [(2, 0)]


def test_the_initial_level_is_that_of_version_0() -> None:
    events = [e for e in journal(8) if isinstance(e, GroupDispatched | ExecutionStarted | StepDone)]
    rewards = {"0-0": 0.25, "1-0": 0.75, "20-0": 0.9}
    outcomes = {
        name: Outcome(execution_id=name, validity=Validity.VALID, reward=reward, cause="completed")
        for name, reward in rewards.items()
    }
    outcomes["2-0"] = Outcome(execution_id="2-0", validity=Validity.UNRESOLVED, reward=1.0, cause="overall_timeout")
    assert next(e.version for e in events if isinstance(e, GroupDispatched) and e.group == 12) > 0
    assert summarise(events, outcomes, {}).initial_reward == 0.5


def test_an_unresolved_execution_has_no_reward() -> None:
    outcome = Outcome(execution_id="0-0", validity=Validity.UNRESOLVED, reward=0.0, cause="verifier_timeout")
    summary = summarise(journal(4), {"0-0": outcome}, {})
    (shown,) = [execution for execution in summary.executions if execution.id == "0-0"]
    assert shown.reward is None
    assert {e["id"]: e["reward"] for e in as_json(summary)["executions"]}["0-0"] is None
    row = next(row for row in executions_table(summary.executions).rows if row[0] == "0-0")
    assert not any("0.000" in cell for cell in row)
    assert "no reward" in outcome_sentence(outcome)
