"""Data parallelism inside a cell: what each replica does of a micro-step, and the one result of all of them.

An execution stays with one replica, so its clip needs nothing from the others; gradients are summed once a batch.
"""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from gyre.core.drift import merged
from gyre.training.base import MicroStepResult
from gyre.training.micro import Entry
from gyre.trajectory.microstep import MicroStep
from gyre.trajectory.prefixes import SharedRows


def share(micro_step: MicroStep, replicas: int) -> list[MicroStep]:
    """One micro-step per replica, possibly without executions; each execution is in exactly one of them.

    Executions go, most expensive first, to the replica with the least cost so far. A replica's packs are what it keeps
    of the micro-step's packs, joined as long as none grows beyond the largest of those. Deterministic.
    """
    return [micro_step] if replicas == 1 else _Division(micro_step).shares(replicas)


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
        ratios=merged(r.ratios for r in results),
        scored=any(r.scored for r in results),
    )


class _Division:
    def __init__(self, micro_step: MicroStep) -> None:
        self._whole = micro_step
        entries = [(i, r) for i, execution in enumerate(micro_step.executions) for r in range(len(execution.rows))]
        self._row = {entry: number for number, entry in enumerate(entries)}
        self._sizes = SharedRows([micro_step.executions[i].rows[r] for i, r in entries])
        self._budget = max(map(self._tokens, micro_step.packs), default=0)

    def shares(self, replicas: int) -> list[MicroStep]:
        costs = [self._cost(i) for i in range(len(self._whole.executions))]
        load = [0.0] * replicas
        members: list[list[int]] = [[] for _ in range(replicas)]
        for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
            replica = min(range(replicas), key=lambda r: (load[r], r))
            load[replica] += costs[i]
            members[replica].append(i)
        return [self._only(sorted(mine), cost) for mine, cost in zip(members, load, strict=True)]

    def _only(self, executions: list[int], cost: float) -> MicroStep:
        number = {execution: k for k, execution in enumerate(executions)}
        kept = ([entry for entry in pack if entry[0] in number] for pack in self._whole.packs)
        return replace(
            self._whole,
            executions=[self._whole.executions[i] for i in executions],
            packs=[[(number[i], r) for i, r in pack] for pack in self._join(pack for pack in kept if pack)],
            tokens=sum(len(row.ids_T) for i in executions for row in self._whole.executions[i].rows),
            cost=cost,
        )

    def _join(self, packs: Iterable[list[Entry]]) -> list[list[Entry]]:
        """First fit, in the order given."""
        joined: list[list[Entry]] = []
        for pack in packs:
            room = next((other for other in joined if self._tokens([*other, *pack]) <= self._budget), None)
            if room is None:
                joined.append(pack)
            else:
                room.extend(pack)
        return joined

    def _cost(self, execution: int) -> float:
        rows = range(len(self._whole.executions[execution].rows))
        return self._sizes.size(self._row[execution, r] for r in rows).cost

    def _tokens(self, pack: Sequence[Entry]) -> int:
        return self._sizes.size(self._row[entry] for entry in pack).tokens
