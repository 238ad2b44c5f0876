"""The trainer as the controller sees it, and the unit of work that a cell claims.

Shapes: `_T` tokens of a row; targets of a row are indexed by position in the row, ascending.
"""

from typing import Protocol

import msgspec

from gyre.transport.base import WeightRef


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One root-to-leaf path of a trajectory tree, as the policy saw it."""

    ids_T: list[int]
    targets: list[int]
    """Positions t ≥ 1 in `ids_T` whose token contributes loss (predicted from position t−1). Disjoint over the rows of
    an execution as tree tokens: each sampled token is a target of at most one row."""
    logprobs: list[float]
    """Behaviour log-probability of each target."""
    versions: list[int]
    """Policy version that sampled each target."""


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

    One pack: a single forward–backward. More packs: an exact no-grad scoring pass over all of them comes first, because
    an execution's clip needs all its log-probs before its first backward (DESIGN §6).
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


class MicroStepResult(msgspec.Struct, frozen=True, kw_only=True):
    loss: float
    """Σ weight_i · Σ_u ℓ_u over the executions of the micro-step."""
    targets: int
    executions: int
    clipped_executions: int
    """m_i = 0 by the sequence-level clip."""
    gap_count: int
    """Targets sampled at exactly the trained version."""
    gap_sum: float
    """Σ |trainer log-prob − behaviour log-prob| over them."""
    gap_max: float
    ratio_max: float
    """Largest token ratio ρ_u before the cap."""
    scored: bool
    """True when a separate scoring pass was needed."""


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    """Version after the step."""
    grad_norm: float
    """Global norm before clipping."""


class Trainer(Protocol):
    """One training rank of a cell. The controller calls every rank of a cell; collectives are entered by all members.

    Life: (asleep) wake → join → micro_step* → reduce → [core: optimizer_step → publish] → … → sleep.
    """

    async def wake(self) -> None:
        """Allocates parameters and gradients (core: and optimizer state). Idempotent."""
        ...

    async def sleep(self) -> None:
        """Returns memory to the cell's engine. The core keeps parameters and optimizer state in host memory."""
        ...

    async def join(self, version: int, weights: WeightRef | None) -> None:
        """Enters the batch that trains `version`: zero gradients; a satellite pulls `weights`, the core passes None."""
        ...

    async def micro_step(self, micro_step: MicroStep) -> MicroStepResult:
        """Adds the micro-step's gradient to the local gradient. Either all of it or, on error, none."""
        ...

    async def reduce(self, generation: int, members: int) -> None:
        """Sums gradients of cells 0..members−1 to the core. Called on each of them; members == 1 is a no-op."""
        ...

    async def optimizer_step(self) -> StepStats:
        """Core only: clip, one Adam step, version + 1."""
        ...

    async def publish(self) -> WeightRef:
        """Core only: exposes the current parameters as a snapshot of the current version."""
        ...

    async def score(self, ids_T: list[int]) -> list[float]:
        """log π(ids[t] | ids[:t]) for t = 1..T−1 under the current parameters, no gradient, [T−1]."""
        ...

    async def save(self, directory: str) -> None:
        """Core only: parameters (Hugging Face layout), optimizer state and RNG into `directory`, complete or absent."""
        ...

    async def load(self, directory: str) -> int:
        """Core only: the inverse of `save`; returns the version."""
        ...
