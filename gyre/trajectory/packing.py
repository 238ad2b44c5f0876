"""Rows of executions packed into micro-steps of a token budget, balanced by compute cost (DESIGN §6 "Packing buffer").

An execution's rows share one micro-step, so that its clip sees all its log-probs. Micro-steps are filled with whole
executions up to the budget and evened out by Σn² cost; an execution above the budget has a micro-step of its own with
several packs; a row above the budget has a pack of its own. No row is dropped.
"""

from collections.abc import Sequence

from gyre.trajectory.microstep import ExecutionRows, MicroStep

ATTENTION_BREAK_EVEN = 16384
"""Row length at which attention costs as much as the rest of a layer (about 6 × hidden size of a mid-size model)."""


def row_cost(tokens: int) -> float:
    """Relative compute of a row: linear layers n, attention n²."""
    return tokens + tokens * tokens / ATTENTION_BREAK_EVEN


def contributes(execution: ExecutionRows) -> bool:
    """Whether the execution has a gradient: a zero advantage or no target (L_i = 0) makes every ℓ_u zero.

    Such executions stay in the normalisation (BN counts raw executions) and are left out of compute."""
    return execution.advantage != 0.0 and execution.weight > 0.0 and any(row.targets for row in execution.rows)


def pack(
    group: int, executions: Sequence[ExecutionRows], *, budget_tokens: int, micro_step_prefix: str
) -> list[MicroStep]:
    """Micro-steps of one group, most expensive first; ids are `{micro_step_prefix}-{index}`.

    Executions that do not contribute are left out (count them with `contributes`); a group without any gives [].
    Deterministic, and independent of the order of `executions`."""
    kept = sorted((e for e in executions if contributes(e)), key=lambda e: (-_cost(e), e.execution_id))
    large = [[execution] for execution in kept if _tokens(execution) > budget_tokens]
    bins = large + _balance([e for e in kept if _tokens(e) <= budget_tokens], budget_tokens)
    bins.sort(key=lambda members: (-sum(map(_cost, members)), members[0].execution_id))
    return [
        MicroStep(
            micro_step_id=f"{micro_step_prefix}-{index}",
            groups=[group],
            executions=members,
            packs=_packs(members, budget_tokens),
            tokens=sum(map(_tokens, members)),
            cost=sum(map(_cost, members)),
        )
        for index, members in enumerate(bins)
    ]


def _balance(executions: list[ExecutionRows], budget: int) -> list[list[ExecutionRows]]:
    """As many bins as first-fit-decreasing by tokens needs, then even costs where the budget allows."""
    by_tokens = sorted(executions, key=lambda e: (-_tokens(e), e.execution_id))
    fitted = _first_fit([_tokens(e) for e in by_tokens], budget)
    even: list[list[ExecutionRows]] = [[] for _ in fitted]
    tokens = [0] * len(fitted)
    costs = [0.0] * len(fitted)
    for execution in executions:  # most expensive first
        room = [i for i in range(len(even)) if tokens[i] + _tokens(execution) <= budget]
        if not room:
            return [[by_tokens[i] for i in members] for members in fitted]
        target = min(room, key=lambda i: (costs[i], i))
        even[target].append(execution)
        tokens[target] += _tokens(execution)
        costs[target] += _cost(execution)
    return [members for members in even if members]


def _packs(executions: list[ExecutionRows], budget: int) -> list[list[tuple[int, int]]]:
    entries = [
        (len(row.ids_T), (i, j)) for i, execution in enumerate(executions) for j, row in enumerate(execution.rows)
    ]
    entries.sort(key=lambda entry: (-entry[0], entry[1]))
    return [[entries[k][1] for k in members] for members in _first_fit([n for n, _ in entries], budget)]


def _first_fit(sizes: list[int], budget: int) -> list[list[int]]:
    """Indices per bin, `sizes` descending; a size above the budget fills a bin alone."""
    bins: list[list[int]] = []
    free: list[int] = []
    for index, size in enumerate(sizes):
        target = next((b for b, room in enumerate(free) if size <= room), None)
        if target is None:
            bins.append([index])
            free.append(budget - size)
        else:
            bins[target].append(index)
            free[target] -= size
    return bins


def _tokens(execution: ExecutionRows) -> int:
    return sum(len(row.ids_T) for row in execution.rows)


def _cost(execution: ExecutionRows) -> float:
    return sum(row_cost(len(row.ids_T)) for row in execution.rows)
