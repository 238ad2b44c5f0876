"""What a run did, from its journal, outcomes and records alone: what `gyre inspect` and the final report show."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from gyre.core.events import (
    CellJoined,
    Event,
    ExecutionClosed,
    ExecutionStarted,
    GroupDispatched,
    InvariantBroken,
    LedgerSampled,
    LogprobGapGrew,
    MicroStepDone,
    MicroStepsReturned,
    ProcessLost,
    ProcessRestarted,
    ProxySampled,
    PublicationProbed,
    RunFinished,
    RunStarted,
    StepDone,
    TransitionFinished,
)
from gyre.core.records import Outcome, Validity
from gyre.report.trees import TreeSummary
from gyre.store.journal import on_one_axis, surviving


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """A satellite that entered a batch whose training was under way."""

    cell: int
    step: int
    micro_steps: int
    """Micro-steps of this batch that it processed."""


class ExecutionSummary(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    group: int
    query: str
    harness: str
    version: int | None
    """v_d: version published when its group was dispatched."""
    outcome: Validity | None
    """None while it runs, or when the run ended first."""
    reward: float | None
    """None without an outcome, and for an unresolved one: a failure to grade is no zero."""
    cause: str
    seconds: float
    """From launch to outcome."""
    grading_s: float
    waited_s: float
    """Of these, for a grader."""
    message: str
    tree: TreeSummary


class ProxyTotals(msgspec.Struct, frozen=True, kw_only=True):
    calls: int
    prompt_mismatches: int
    harness_errors_from_transitions: int
    retries: int


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Steps, joins and probes are those of the surviving line of checkpoints; the rest is all that happened."""

    run_id: str
    parts: int
    """1 + resumptions."""
    seconds: float
    finished: RunFinished | None
    """None while the run goes on, or when it was killed."""
    steps: list[StepDone]
    initial_reward: float | None
    """Mean reward of the valid executions that were dispatched at version 0: the level before any RL."""
    transitions: list[TransitionFinished]
    joins: list[Join]
    executions: list[ExecutionSummary]
    probes: list[PublicationProbed]
    broken: list[InvariantBroken]
    """What the run itself reported, and counters in the journal that break 0 ≤ f ≤ p ≤ d or p − f ≤ C_R."""
    recovery: list[ProcessLost | ProcessRestarted | MicroStepsReturned]
    """Processes that were lost, and what followed."""
    proxy: ProxyTotals
    drift: list[LogprobGapGrew] = []
    """Alarms: the gap between trainer and recorded log-probs grows."""

    @property
    def invariants_ok(self) -> bool:
        return not self.broken and self.proxy.prompt_mismatches == 0

    @property
    def staleness_mean(self) -> float | None:
        return mean([staleness for step in self.steps for staleness in step.staleness])


def summarise(events: Iterable[Event], outcomes: Mapping[str, Outcome], trees: Mapping[str, TreeSummary]) -> RunSummary:
    """Pure. `trees` by execution id; an execution without records has no entry."""
    everything = on_one_axis(events)
    line = surviving(everything)
    starts = [event for event in everything if isinstance(event, RunStarted)]
    executions = _executions(everything, outcomes, trees)
    before_rl = [
        e.reward for e in executions if e.version == 0 and e.outcome is Validity.VALID and e.reward is not None
    ]
    return RunSummary(
        run_id=starts[-1].run_id if starts else "",
        parts=max(1, len(starts)),
        seconds=max((event.t for event in everything), default=0.0),
        finished=_finished(everything),
        steps=[event for event in line if isinstance(event, StepDone)],
        initial_reward=mean(before_rl),
        transitions=[event for event in everything if isinstance(event, TransitionFinished)],
        joins=_joins(line),
        executions=executions,
        probes=[event for event in line if isinstance(event, PublicationProbed)],
        broken=[event for event in everything if isinstance(event, InvariantBroken)] + broken_counters(everything),
        recovery=[e for e in everything if isinstance(e, ProcessLost | ProcessRestarted | MicroStepsReturned)],
        drift=[event for event in line if isinstance(event, LogprobGapGrew)],
        proxy=proxy_totals([event for event in everything if isinstance(event, ProxySampled)]),
    )


def as_json(summary: RunSummary) -> dict[str, Any]:
    """The document that `gyre inspect --json` writes: all that the tables show, and every field of the events."""
    document: dict[str, Any] = msgspec.to_builtins(summary)
    return document | {
        "steps": [msgspec.to_builtins(step) | {"staleness_mean": mean(step.staleness)} for step in summary.steps],
        "transitions": [
            msgspec.to_builtins(transition) | {"from": transition.source, "to": transition.target}
            for transition in summary.transitions
        ],
        "executions": [
            msgspec.to_builtins(execution)
            | {
                "outcome": execution.outcome.value if execution.outcome else "running",
                "calls": execution.tree.calls,
                "nodes": execution.tree.nodes,
                "leaves": [{"role": leaf.role.value, "targets": leaf.targets} for leaf in execution.tree.leaves],
            }
            for execution in summary.executions
        ],
        "staleness_mean": summary.staleness_mean,
        "invariants_ok": summary.invariants_ok,
        "harness_errors_from_transitions": summary.proxy.harness_errors_from_transitions,
    }


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _finished(events: Sequence[Event]) -> RunFinished | None:
    ends = [event for event in events if isinstance(event, RunStarted | RunFinished)]
    return ends[-1] if ends and isinstance(ends[-1], RunFinished) else None


def _joins(line: Sequence[Event]) -> list[Join]:
    """A cell that was lost in a batch and joined it again has two; what went back to the queue it did not do."""
    joined: list[CellJoined] = []
    done: list[int] = []
    latest: dict[tuple[int, int], int] = {}
    """(cell, step) → its last join."""
    for event in line:
        match event:
            case CellJoined(cell=cell, step=step, late=True) if cell > 0:
                latest[cell, step] = len(joined)
                joined.append(event)
                done.append(0)
            case MicroStepDone(cell=cell, step=step) if (cell, step) in latest:
                done[latest[cell, step]] += 1
            case MicroStepsReturned(cell=cell, step=step) if (cell, step) in latest:
                done[latest[cell, step]] = 0
            case _:
                pass
    return [Join(cell=event.cell, step=event.step, micro_steps=n) for event, n in zip(joined, done, strict=True)]


def _executions(
    events: Sequence[Event], outcomes: Mapping[str, Outcome], trees: Mapping[str, TreeSummary]
) -> list[ExecutionSummary]:
    """In the order of their (last) start: a resumption may launch again what was cut off."""
    versions = {event.group: event.version for event in events if isinstance(event, GroupDispatched)}
    started: dict[str, ExecutionStarted] = {}
    closed: dict[str, ExecutionClosed] = {}
    for event in events:
        if isinstance(event, ExecutionStarted):
            started[event.execution_id] = event
            closed.pop(event.execution_id, None)
        elif isinstance(event, ExecutionClosed):
            closed[event.execution_id] = event
    summaries = []
    for execution_id, start in started.items():
        outcome, end = outcomes.get(execution_id), closed.get(execution_id)
        validity = outcome.validity if outcome else Validity(end.validity) if end else None
        reward = outcome.reward if outcome else end.reward if end else None
        summaries.append(
            ExecutionSummary(
                id=execution_id,
                group=start.group,
                query=start.query,
                harness=start.harness,
                version=versions.get(start.group),
                outcome=validity,
                reward=None if validity is Validity.UNRESOLVED else reward,
                cause=outcome.cause if outcome else end.cause if end else "",
                seconds=end.seconds if end else 0.0,
                grading_s=end.grading_s if end else 0.0,
                waited_s=end.waited_s if end else 0.0,
                message=outcome.message if outcome else end.message if end else "",
                tree=trees.get(execution_id, TreeSummary()),
            )
        )
    return summaries


def broken_counters(events: Sequence[Event]) -> list[InvariantBroken]:
    return [
        InvariantBroken(
            t=event.t,
            name="ledger counters in the journal",
            detail=f"d={event.d} p={event.p} f={event.f} C_R={event.capacity}",
        )
        for event in events
        if isinstance(event, LedgerSampled)
        and not (0 <= event.f <= event.p <= event.d and event.p - event.f <= event.capacity)
    ]


def proxy_totals(samples: Sequence[ProxySampled]) -> ProxyTotals:
    """Counters of a worker restart at zero with it, so a total is the sum of the increases."""

    def total(name: str) -> int:
        values = [0, *(getattr(sample, name) for sample in samples)]
        return sum(value - before if value >= before else value for before, value in pairwise(values))

    return ProxyTotals(**{name: total(name) for name in ProxyTotals.__struct_fields__})
