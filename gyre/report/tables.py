"""The tables of a run as plain text, one function a table: `gyre inspect` prints them, pages show them."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from gyre.core.events import MicroStepsReturned, ProcessLost, ProcessRestarted
from gyre.core.records import Assessment, CallRecord, Outcome, RoleClass, Validity
from gyre.report.summary import ExecutionSummary, RunSummary, mean


class Column(NamedTuple):
    name: str
    left: bool = False
    """Text; the others hold numbers and are aligned to the right."""


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Every row has a string for every column. Nothing is escaped yet."""

    title: str
    columns: list[Column]
    rows: list[list[str]]
    bad: frozenset[int] = frozenset()
    """Indices of the rows that tell of a loss."""


def steps_table(summary: RunSummary) -> Table:
    rows = []
    for step in summary.steps:
        measured = step.logprob_gap_count > 0
        rows.append(
            [
                str(step.step),
                f"{step.reward_mean:.3f}",
                number(mean(step.staleness)),
                f"{step.logprob_gap_mean:.1e}" if measured else "–",
                f"{step.logprob_gap_max:.1e}" if measured else "–",
                str(step.targets),
                f"{step.clipped_executions}/{step.executions}",
                f"{step.seconds:.1f}",
                " ".join(map(str, step.cells)),
            ]
        )
    return Table(
        title="Steps",
        columns=[
            *_numbers("step", "reward", "staleness", "log-prob gap mean", "max", "targets", "clipped", "seconds"),
            Column("cells", left=True),
        ],
        rows=rows,
    )


def transitions_table(summary: RunSummary) -> Table:
    return Table(
        title="Role transitions",
        columns=_numbers("t", "cell", "from → to", "calls in flight", "rerouted", "with KV", "seconds"),
        rows=[
            [
                f"{event.t:.1f}",
                str(event.cell),
                f"{event.source} → {event.target}",
                str(event.calls_in_flight),
                str(event.rerouted),
                str(event.with_kv),
                f"{event.seconds:.2f}",
            ]
            for event in summary.transitions
        ],
    )


def joins_table(summary: RunSummary) -> Table:
    return Table(
        title="Satellites that joined a batch under way",
        columns=_numbers("cell", "step", "micro-steps"),
        rows=[[str(join.cell), str(join.step), str(join.micro_steps)] for join in summary.joins],
    )


def recovery_table(summary: RunSummary) -> Table:
    rows, bad = [], set()
    for index, event in enumerate(summary.recovery):
        match event:
            case ProcessLost():
                row = [event.name, f"lost: {event.detail}"]
                bad.add(index)
            case ProcessRestarted():
                row = [event.name, f"replaced after {event.seconds:.1f} s"]
            case MicroStepsReturned():
                row = [f"cell {event.cell}", f"{event.micro_steps} micro-steps of step {event.step} back in the queue"]
        rows.append([f"{event.t:.1f}", *row])
    return Table(
        title="Processes lost and replaced",
        columns=[Column("t"), Column("process", left=True), Column("what", left=True)],
        rows=rows,
        bad=frozenset(bad),
    )


def executions_table(executions: Sequence[ExecutionSummary], title: str = "Executions") -> Table:
    return Table(
        title=title,
        columns=[
            Column("id"),
            Column("query", left=True),
            Column("harness", left=True),
            Column("v"),
            Column("outcome", left=True),
            *_numbers("reward", "seconds", "calls", "nodes"),
            Column("leaves (targets)", left=True),
        ],
        rows=[
            [
                execution.id,
                execution.query,
                execution.harness,
                "–" if execution.version is None else str(execution.version),
                outcome_text(execution),
                "–" if execution.reward is None else f"{execution.reward:.3f}",
                f"{execution.seconds:.1f}" if execution.seconds else "–",
                str(execution.tree.calls),
                str(execution.tree.nodes),
                leaves_text(execution),
            ]
            for execution in executions
        ],
    )


def calls_table(records: Sequence[CallRecord], seq_of: dict[str, int]) -> Table:
    """`seq_of`: call id → seq of every call of the execution, for the column "extends"."""
    rows = []
    for record in records:
        notes = [*record.flags, *(f"{kind}×{count}" for kind, count in record.drift.items())]
        rows.append(
            [
                str(record.seq),
                "root" if record.parent is None else f"call {seq_of.get(record.parent, '?')}",
                record.role.value,
                record.agent_id,
                str(record.prefix_len),
                str(len(record.delta_ids)),
                str(len(record.output_ids)),
                record.finish,
                "→".join(map(str, record.cells)),
                " ".join(map(str, sorted(set(record.output_versions)))),
                ", ".join(notes if record.trainable else ["never a target", *notes]),
            ]
        )
    right = ("call", "shared", "new in", "out")
    names = ("call", "extends", "role", "agent", *right[1:], "finish", "cells", "versions", "notes")
    return Table(title="Calls", columns=[Column(name, left=name not in right) for name in names], rows=rows)


def outcome_text(execution: ExecutionSummary) -> str:
    if execution.outcome is None:
        return "running"
    return f"{execution.outcome.value} ({execution.cause})" if execution.cause else execution.outcome.value


def leaves_text(execution: ExecutionSummary) -> str:
    """ "2 main (310), 1 sub-agent (42)": leaves and their targets by role class."""
    leaves = Counter(leaf.role for leaf in execution.tree.leaves)
    targets: Counter[RoleClass] = Counter()
    for leaf in execution.tree.leaves:
        targets[leaf.role] += leaf.targets
    return ", ".join(f"{leaves[role]} {role.value} ({targets[role]})" for role in RoleClass if leaves[role])


def outcome_sentence(outcome: Outcome) -> str:
    reward = "no reward" if outcome.validity is Validity.UNRESOLVED else f"reward {outcome.reward:.3f}"
    return f"outcome: {outcome.validity.value}, {reward}, {outcome.cause}. {outcome.message}"


def assessment_sentence(assessment: Assessment) -> str:
    score = "no score" if assessment.score is None else f"score {assessment.score:.3f}"
    parts = ", ".join(f"{name} {value:.3f}" for name, value in assessment.detail.items())
    flags = f"[{', '.join(assessment.flags)}]" if assessment.flags else ""
    said = (score, parts, flags, assessment.error)
    return f"assessment by {assessment.evaluator}: {' '.join(part for part in said if part)}"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _numbers(*names: str) -> list[Column]:
    return [Column(name) for name in names]
