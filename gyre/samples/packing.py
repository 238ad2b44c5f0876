"""Rows of executions packed into micro-steps of a token budget, balanced by compute cost (docs/objective.md).

An execution's rows share one micro-step, so that its clip sees all its log-probs. Tokens and cost are those of packed
trees: what several rows of a pack begin with counts once, within an execution and between executions of the group.
The budget is that of one replica of a cell in one pass. Each replica's part of a micro-step is filled with whole
executions up to the budget, and parts are evened out by cost; an execution above the budget has a part of its own with
several packs; a row above the budget has a pack of its own. No row is dropped.
"""

from collections.abc import Sequence
from itertools import pairwise

from msgspec.structs import replace

from gyre.samples.expert_routing import agreed
from gyre.samples.microstep import ExecutionRows, MicroStep
from gyre.samples.prefixes import ATTENTION_BREAK_EVEN, SharedRows, Size


def row_cost(tokens: int) -> float:
    """Relative compute of a row of its own: linear layers n, attention n²."""
    return tokens + tokens * tokens / ATTENTION_BREAK_EVEN


def contributes(execution: ExecutionRows) -> bool:
    """Whether the execution has a gradient: a zero advantage or no target (L_i = 0) makes every ℓ_u zero.

    Such executions stay in the normalisation (BN counts raw executions) and are left out of compute."""
    return execution.advantage != 0.0 and execution.weight > 0.0 and any(row.targets for row in execution.rows)


def pack(
    group: int,
    executions: Sequence[ExecutionRows],
    *,
    budget_tokens: int,
    micro_step_prefix: str,
    replicas: int = 1,
    share_prefixes: bool = True,
) -> list[MicroStep]:
    """Micro-steps of one group for cells of `replicas` replicas, most expensive first; ids are
    `{micro_step_prefix}-{index}`.

    Executions that do not contribute are left out (count them with `contributes`); a group without any gives [].
    Parts of one micro-step have no pack in common, and neighbours in cost share a micro-step, so that replicas end
    together. Deterministic, and independent of the order of `executions`."""
    kept = sorted((e for e in executions if contributes(e)), key=lambda e: e.execution_id)
    if share_prefixes:
        rows = iter(agreed([row for execution in kept for row in execution.rows]))
        kept = [replace(execution, rows=[next(rows) for _ in execution.rows]) for execution in kept]
    group_rows = _GroupRows(kept, budget_tokens, share_prefixes)
    bins = group_rows.bins(replicas)
    bins.sort(key=lambda members: (-members.size.cost, members.executions))
    parts = [bins[first : first + replicas] for first in range(0, len(bins), replicas)]
    return [group_rows.micro_step(group, f"{micro_step_prefix}-{index}", mine) for index, mine in enumerate(parts)]


class _Bin:
    """Executions, by index, that one replica does in one micro-step."""

    def __init__(self) -> None:
        self.executions: list[int] = []
        self.size = Size(0, 0.0)


def _put(execution: int, target: _Bin, size: Size) -> None:
    target.executions.append(execution)
    target.size = size


class _GroupRows:
    def __init__(self, executions: Sequence[ExecutionRows], budget: int, share_prefixes: bool) -> None:
        self._executions = executions
        self._budget = budget
        starts = [0]
        for execution in executions:
            starts.append(starts[-1] + len(execution.rows))
        self._rows = [range(a, b) for a, b in pairwise(starts)]
        self._shared = SharedRows([row for execution in executions for row in execution.rows], share_prefixes)
        self._sizes = [self._shared.size(rows) for rows in self._rows]
        self._shares = [any(map(self._shared.shares, rows)) for rows in self._rows]

    def bins(self, replicas: int) -> list[_Bin]:
        """As many as first-fit-decreasing by tokens needs, rounded up so that no replica idles, then even costs where
        the budget allows."""
        sizes = self._sizes
        by_tokens = sorted(range(len(sizes)), key=lambda i: (-sizes[i].tokens, i))
        by_cost = sorted(range(len(sizes)), key=lambda i: (-sizes[i].cost, i))
        bins: list[_Bin] = []
        for i in by_tokens:
            joined = ((one, self._joined(one, i)) for one in bins)
            fitting = next((option for option in joined if option[1].tokens <= self._budget), None)
            if fitting is None:
                fitting = _Bin(), sizes[i]
                bins.append(fitting[0])
            _put(i, *fitting)
        even = [_Bin() for _ in range(-(-len(bins) // replicas) * replicas)]
        for i in by_cost:
            options = [(one, self._joined(one, i)) for one in even]
            options = [(one, size) for one, size in options if size.tokens <= self._budget or not one.executions]
            if not options:
                return bins
            _put(i, *min(options, key=lambda option: option[1].cost))
        return [one for one in even if one.executions]

    def micro_step(self, group: int, name: str, parts: Sequence[_Bin]) -> MicroStep:
        order = [i for part in parts for i in part.executions]
        names = {row: (e, r) for e, i in enumerate(order) for r, row in enumerate(self._rows[i])}
        executions = [self._executions[i] for i in order]
        return MicroStep(
            micro_step_id=name,
            groups=[group],
            executions=executions,
            packs=[[names[row] for row in rows] for part in parts for rows in self._packs(part)],
            tokens=sum(len(row.ids_T) for execution in executions for row in execution.rows),
            cost=sum(part.size.cost for part in parts),
        )

    def _packs(self, members: _Bin) -> list[list[int]]:
        """Forward passes within the budget; rows that begin alike go into the same one."""
        packs: list[list[int]] = []
        for row in self._shared.ordered(row for i in members.executions for row in self._rows[i]):
            if packs and self._shared.size([*packs[-1], row]).tokens <= self._budget:
                packs[-1].append(row)
            else:
                packs.append([row])
        return packs

    def _joined(self, one: _Bin, execution: int) -> Size:
        if not self._shares[execution]:
            return one.size + self._sizes[execution]
        return self._shared.size([row for i in (*one.executions, execution) for row in self._rows[i]])
