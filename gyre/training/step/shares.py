"""Data parallelism inside a cell: what each replica does of a micro-step, and the one result of all of them.

An execution stays with one replica, so its clip needs nothing from the others; gradients are summed once a batch.
"""

from msgspec.structs import replace

from gyre.samples.microstep import MicroStep
from gyre.samples.packing import row_cost


def share(micro_step: MicroStep, replicas: int) -> list[MicroStep]:
    """One micro-step per replica, possibly without executions; each execution is in exactly one of them.

    Packs stay as they are, and those that have an execution in common stay together. Such parts go, most expensive
    first, to the replica with the least cost so far: a micro-step that was packed for this number of replicas has at
    most one part for each. Deterministic.
    """
    if replicas == 1:
        return [micro_step]
    costs = [sum(row_cost(len(row.ids_T)) for row in execution.rows) for execution in micro_step.executions]
    parts = [(sum(costs[i] for i in part), part) for part in _parts(micro_step)]
    load = [0.0] * replicas
    members: list[list[int]] = [[] for _ in range(replicas)]
    for cost, part in sorted(parts, key=lambda entry: (-entry[0], entry[1])):
        replica = min(range(replicas), key=lambda r: (load[r], r))
        load[replica] += cost
        members[replica] += part
    return [_only(micro_step, sorted(mine), cost) for mine, cost in zip(members, load, strict=True)]


def _parts(micro_step: MicroStep) -> list[list[int]]:
    """Executions, by index, whose packs stay together."""
    part = list(range(len(micro_step.executions)))
    for pack in micro_step.packs:
        joined = {part[i] for i, _ in pack}
        part = [min(joined) if p in joined else p for p in part]
    return [[i for i, p in enumerate(part) if p == first] for first in sorted(set(part))]


def _only(micro_step: MicroStep, executions: list[int], cost: float) -> MicroStep:
    number = {execution: k for k, execution in enumerate(executions)}
    return replace(
        micro_step,
        executions=[micro_step.executions[i] for i in executions],
        packs=[[(number[i], r) for i, r in pack] for pack in micro_step.packs if pack and pack[0][0] in number],
        tokens=sum(len(row.ids_T) for i in executions for row in micro_step.executions[i].rows),
        cost=cost,
    )
