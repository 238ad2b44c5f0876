"""What happens inside a micro-step: exact execution-level clip decisions, then the loss of each pack.

An `Evaluation` lives where log-probabilities come out: on the last pipeline stage. It knows neither model nor layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gyre.core.drift import Histograms, merged, ratio_histograms
from gyre.core.errors import InvariantViolation
from gyre.samples.microstep import ExecutionRows, MicroStep, MicroStepResult, Row
from gyre.training.step import objective
from gyre.training.step.objective import ObjectiveConfig

Entry = tuple[int, int]
"""(execution index, row index) in a micro-step."""


@dataclass(frozen=True)
class ClipDecision:
    """m_i and what led to it, of one execution with targets."""

    keeps: bool
    sequence_ratio: float


def require_known(ids_T: Sequence[int], vocabulary: int, where: str) -> None:
    """Raises InvariantViolation for token ids that the model does not have: split over tensor-parallel ranks, or as a
    target, one would be scored as if its logit were 0."""
    if ids_T and not 0 <= min(ids_T) <= max(ids_T) < vocabulary:
        raise InvariantViolation(
            f"{where}: its token ids are from {min(ids_T)} to {max(ids_T)} and the model has {vocabulary} of them; "
            "engines and trainer must have the same model"
        )


def check(micro_step: MicroStep, vocabulary: int) -> None:
    """Raises InvariantViolation when the packs do not hold every row exactly once, a row is inconsistent, or it has
    tokens that are not in the model's vocabulary."""
    name = micro_step.micro_step_id
    rows = [(i, r) for i, execution in enumerate(micro_step.executions) for r in range(len(execution.rows))]
    if sorted(entry for pack in micro_step.packs for entry in pack) != rows:
        raise InvariantViolation(f"micro-step {name}: its packs do not hold each of its {len(rows)} rows exactly once")
    for execution in micro_step.executions:
        for row in execution.rows:
            require_known(row.ids_T, vocabulary, f"micro-step {name}, execution {execution.execution_id}")
            counts = {len(row.targets), len(row.logprobs), len(row.versions)}
            ordered = all(a < b for a, b in zip([0, *row.targets], [*row.targets, len(row.ids_T)], strict=True))
            if len(counts) != 1 or not ordered:
                raise InvariantViolation(
                    f"micro-step {name}, execution {execution.execution_id}: a row of {len(row.ids_T)} tokens has "
                    f"{len(row.targets)} targets, {len(row.logprobs)} log-probs and {len(row.versions)} versions; "
                    "targets must ascend inside 1..T−1 and the counts agree"
                )
            if row.routing is not None and row.routing.positions != (row.targets[-1] if row.targets else 0):
                raise InvariantViolation(
                    f"micro-step {name}, execution {execution.execution_id}: a row has experts for "
                    f"{row.routing.positions} positions, not for the {row.targets[-1]} before its last target"
                )


def rows_of(micro_step: MicroStep, pack: Sequence[Entry]) -> list[Row]:
    """The rows of one pack."""
    return [micro_step.executions[i].rows[r] for i, r in pack]


def needs_scoring(micro_step: MicroStep) -> bool:
    """Whether a no-grad pass over all packs must come before the first backward: an execution's clip needs all of its
    log-probs, and never more than one pack's activations are kept."""
    return len(micro_step.packs) > 1


def computed_packs(micro_step: MicroStep) -> int:
    """Packs that have targets; the others are left out."""
    return sum(any(row.targets for row in rows_of(micro_step, pack)) for pack in micro_step.packs)


class Evaluation:
    """One micro-step: `observe` every pack when it needs scoring, then `loss` for every pack, then `result`. Packs
    without targets are left out."""

    def __init__(self, micro_step: MicroStep, version: int, config: ObjectiveConfig) -> None:
        self._micro_step = micro_step
        self._version = version
        self._config = config
        self._logprobs: dict[Entry, torch.Tensor] = {}
        self._decisions: list[ClipDecision | None] = []
        self._total = 0.0

    def observe(self, pack: Sequence[Entry], logprobs: Sequence[torch.Tensor]) -> None:
        """Takes the scoring pass's log π of the targets of each row of a pack."""
        self._logprobs.update(zip(pack, (values.detach() for values in logprobs), strict=True))

    def loss(self, pack: Sequence[Entry], logprobs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Σ weight_i · ℓ_u over the targets of one pack, which has some. Raises InvariantViolation when the loss is not
        finite."""
        if not needs_scoring(self._micro_step):
            self.observe(pack, logprobs)
        if not self._decisions:
            self._decisions = [self._decide(i, execution) for i, execution in enumerate(self._micro_step.executions)]
        parts = []
        for (i, r), values in zip(pack, logprobs, strict=True):
            execution, decision = self._micro_step.executions[i], self._decisions[i]
            if decision is not None and len(values):
                behaviour = _behaviour([execution.rows[r]], values)
                losses = objective.token_losses(values, behaviour, execution.advantage, decision.keeps, self._config)
                parts.append(execution.weight * losses.sum())
        loss = torch.stack(parts).sum()
        value = float(loss.detach())
        if value - value != 0.0:
            raise InvariantViolation(
                f"micro-step {self._micro_step.micro_step_id} has loss {value}: its gradient is not used"
            )
        self._total += value
        return loss

    def result(self) -> MicroStepResult:
        gaps: list[float] = []
        histograms: list[Histograms] = []
        for (i, r), values in self._logprobs.items():
            row = self._micro_step.executions[i].rows[r]
            if row.targets:
                ratios = objective.log_ratios(values, _behaviour([row], values)).exp()
                histograms.append(ratio_histograms(ratios.tolist(), row.versions))
            for mine, recorded, sampled_at in zip(values.tolist(), row.logprobs, row.versions, strict=True):
                if sampled_at == self._version:
                    gaps.append(abs(mine - recorded))
        made = [decision for decision in self._decisions if decision is not None]
        return MicroStepResult(
            loss=self._total,
            targets=sum(len(row.targets) for e in self._micro_step.executions for row in e.rows),
            executions=len(self._micro_step.executions),
            clipped_executions=sum(not decision.keeps for decision in made),
            gap_count=len(gaps),
            gap_sum=sum(gaps),
            gap_max=max(gaps, default=0.0),
            ratios=merged(histograms),
        )

    def _decide(self, index: int, execution: ExecutionRows) -> ClipDecision | None:
        if not any(row.targets for row in execution.rows):
            return None
        logprobs = torch.cat([self._logprobs[index, r] for r, row in enumerate(execution.rows) if row.targets])
        ratios = objective.log_ratios(logprobs, _behaviour(execution.rows, logprobs))
        ratio = objective.sequence_ratio(ratios)
        keeps = objective.keeps_gradient(ratio, execution.advantage, self._config)
        return ClipDecision(keeps, ratio)


def _behaviour(rows: Sequence[Row], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor([p for row in rows for p in row.logprobs], dtype=torch.float64, device=like.device)
