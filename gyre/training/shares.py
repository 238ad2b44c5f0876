"""Data parallelism inside a cell: what each replica does of a micro-step, and the one result of all of them.

An execution stays with one replica, so its clip needs nothing from the others; gradients are summed once a batch.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from gyre.training.base import MicroStepResult
from gyre.training.micro import Entry
from gyre.trajectory.microstep import MicroStep
from gyre.trajectory.packing import row_cost


def share(micro_step: MicroStep, replicas: int) -> list[MicroStep]:
    """One micro-step per replica, possibly without executions; each execution is in exactly one of them.

    Executions go, most expensive first, to the replica with the least cost so far. A replica's packs are what it keeps
    of the micro-step's packs, joined as long as none grows beyond the largest of those. Deterministic.
    """
    if replicas == 1:
        return [micro_step]
    costs = [sum(row_cost(len(row.ids_T)) for row in execution.rows) for execution in micro_step.executions]
    load = [0.0] * replicas
    members: list[list[int]] = [[] for _ in range(replicas)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        replica = min(range(replicas), key=lambda r: (load[r], r))
        load[replica] += costs[i]
        members[replica].append(i)
    return [_only(micro_step, sorted(mine), costs) for mine in members]


def combine(results: Sequence[MicroStepResult]) -> MicroStepResult:
    """The result of the whole micro-step from those of its shares."""
    return MicroStepResult(
        loss=sum(r.loss for r in results),
        targets=sum(r.targets for r in results),
        executions=sum(r.executions for r in results),
        clipped_executions=sum(r.clipped_executions for r in results),
        gap_count=sum(r.gap_count for r in results),
        gap_sum=sum(r.gap_sum for r in results),
        gap_max=max(r.gap_max for r in results),
        ratio_max=max(r.ratio_max for r in results),
        scored=any(r.scored for r in results),
    )


def _only(micro_step: MicroStep, executions: list[int], costs: list[float]) -> MicroStep:
    number = {execution: k for k, execution in enumerate(executions)}
    kept = [[(i, r) for i, r in pack if i in number] for pack in micro_step.packs]
    budget = max((_tokens(micro_step, pack) for pack in micro_step.packs), default=0)
    packs = _join(micro_step, [pack for pack in kept if pack], budget)
    return replace(
        micro_step,
        executions=[micro_step.executions[i] for i in executions],
        packs=[[(number[i], r) for i, r in pack] for pack in packs],
        tokens=sum(_tokens(micro_step, pack) for pack in packs),
        cost=sum(costs[i] for i in executions),
    )


def _join(micro_step: MicroStep, packs: list[list[Entry]], budget: int) -> list[list[Entry]]:
    """First fit, in the order given."""
    joined: list[list[Entry]] = []
    for pack in packs:
        size = _tokens(micro_step, pack)
        room = next((other for other in joined if _tokens(micro_step, other) + size <= budget), None)
        if room is None:
            joined.append(list(pack))
        else:
            room.extend(pack)
    return joined


def _tokens(micro_step: MicroStep, pack: Sequence[Entry]) -> int:
    return sum(len(micro_step.executions[i].rows[r].ids_T) for i, r in pack)
