"""The unit of training work: rows of executions, packed into micro-steps (docs/objective.md).

Shapes: `_T` tokens of a row; targets of a row are indexed by position in the row, ascending.
"""

import msgspec

from gyre.core.expert_routing import ExpertRouting

DISCARDED = -1
"""Instead of a version: weights that a crash lost. A resumed run has others of the same number."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One root-to-leaf path of a trajectory tree, as the policy saw it."""

    ids_T: list[int]
    targets: list[int]
    """Positions t ≥ 1 in `ids_T` whose token contributes loss (predicted from position t−1). Disjoint over the rows of
    an execution as tree tokens: each sampled token is a target of at most one row."""
    logprobs: list[float]
    """Behaviour log-probability of each target."""
    versions: list[int]
    """Policy version that sampled each target, or DISCARDED."""
    routing: ExpertRouting | None = None
    """Experts that computed the positions before the last target, [T − 1], some maybe absent; None: none recorded."""


class ExecutionRows(msgspec.Struct, frozen=True, kw_only=True):
    """All admitted rows of one execution. They stay in one micro-step, so the execution-level clip is exact."""

    execution_id: str
    advantage: float
    """Group-relative advantage Â_i, shared by all rows."""
    weight: float
    """1 / (BN · L_i) with BN raw executions of the batch and L_i targets of this execution; 0 when L_i = 0."""
    rows: list[Row]


class MicroStep(msgspec.Struct, frozen=True, kw_only=True):
    """What a cell claims: whole executions, packed into forward passes of at most the token budget.

    Packs of different executions may go to different replicas of the cell. One pack for a replica: a single
    forward–backward. More packs: an exact no-grad scoring pass over all of them comes first, because the clip of an
    execution needs all its log-probs before its first backward (docs/objective.md).
    """

    micro_step_id: str
    groups: list[int]
    executions: list[ExecutionRows]
    packs: list[list[tuple[int, int]]]
    """Forward passes; each entry is (execution index, row index), every row exactly once."""
    tokens: int
    """Σ row tokens."""
    cost: float
    """Relative compute cost (linear plus Σn² attention part), for balancing."""
