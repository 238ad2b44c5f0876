"""What happens inside a micro-step: exact execution-level clip decisions, then loss and backward, pack by pack.

The model is reached through two functions, so that this file is the same for every parallel layout.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gyre.core.errors import InvariantViolation
from gyre.training import objective
from gyre.training.base import MicroStepResult
from gyre.training.objective import ObjectiveConfig
from gyre.trajectory.microstep import ExecutionRows, MicroStep, Row

Forward = Callable[[Sequence[Row]], list[torch.Tensor]]
"""Rows of one pack → log π of the targets of each row."""
Entry = tuple[int, int]
"""(execution index, row index) in a micro-step."""


@dataclass(frozen=True)
class Decision:
    """m_i and what led to it, of one execution with targets."""

    keeps: bool
    sequence_ratio: float
    ratio_max: float


def check(micro_step: MicroStep) -> None:
    """Raises InvariantViolation when the packs do not hold every row exactly once or a row is inconsistent."""
    name = micro_step.micro_step_id
    rows = [(i, r) for i, execution in enumerate(micro_step.executions) for r in range(len(execution.rows))]
    if sorted(entry for pack in micro_step.packs for entry in pack) != rows:
        raise InvariantViolation(f"micro-step {name}: its packs do not hold each of its {len(rows)} rows exactly once")
    for execution in micro_step.executions:
        for row in execution.rows:
            counts = {len(row.targets), len(row.logprobs), len(row.versions)}
            ordered = all(a < b for a, b in zip([0, *row.targets], [*row.targets, len(row.ids_T)], strict=True))
            if len(counts) != 1 or not ordered:
                raise InvariantViolation(
                    f"micro-step {name}, execution {execution.execution_id}: a row of {len(row.ids_T)} tokens has "
                    f"{len(row.targets)} targets, {len(row.logprobs)} log-probs and {len(row.versions)} versions; "
                    "targets must ascend inside 1..T−1 and the counts agree"
                )


def run(
    micro_step: MicroStep,
    version: int,
    forward: Forward,
    backward: Callable[[torch.Tensor], None],
    config: ObjectiveConfig,
) -> MicroStepResult:
    """Adds the gradient of the micro-step's loss through `backward`, once per pack that has targets.

    One pack: its own forward decides the clips. Several: a no-grad pass over all of them decides first, so that never
    more than one pack's activations exist. Raises InvariantViolation on a loss that is not finite, before its backward.
    """
    scored = len(micro_step.packs) > 1
    logprobs: dict[Entry, torch.Tensor] = {}
    decisions: list[Decision | None] = []
    if scored:
        with torch.no_grad():
            for pack in micro_step.packs:
                logprobs.update(_forward(micro_step, pack, forward))
        decisions = _decide(micro_step, logprobs, config)
    total = 0.0
    for pack in micro_step.packs:
        current = _forward(micro_step, pack, forward)
        if not scored:
            logprobs = {entry: values.detach() for entry, values in current.items()}
            decisions = _decide(micro_step, logprobs, config)
        loss = _loss(micro_step, current, decisions, config)
        if loss is None:
            continue
        total += _finite(loss, micro_step)
        backward(loss)
    return _result(micro_step, version, logprobs, decisions, total, scored)


def _forward(micro_step: MicroStep, pack: list[Entry], forward: Forward) -> dict[Entry, torch.Tensor]:
    rows = [micro_step.executions[i].rows[r] for i, r in pack]
    return dict(zip(pack, forward(rows), strict=True))


def _decide(
    micro_step: MicroStep, logprobs: dict[Entry, torch.Tensor], config: ObjectiveConfig
) -> list[Decision | None]:
    return [
        _decision(execution, [logprobs[i, r] for r in range(len(execution.rows))], config)
        for i, execution in enumerate(micro_step.executions)
    ]


def _decision(execution: ExecutionRows, logprobs: list[torch.Tensor], config: ObjectiveConfig) -> Decision | None:
    if not any(row.targets for row in execution.rows):
        return None
    ratios = objective.log_ratios(torch.cat(logprobs), _behaviour(execution.rows, logprobs[0]))
    ratio = objective.sequence_ratio(ratios)
    keeps = objective.keeps_gradient(ratio, execution.advantage, config)
    return Decision(keeps, ratio, float(ratios.max().exp()))


def _loss(
    micro_step: MicroStep,
    current: dict[Entry, torch.Tensor],
    decisions: list[Decision | None],
    config: ObjectiveConfig,
) -> torch.Tensor | None:
    """Σ weight_i · ℓ_u over the targets of one pack; None when it has none."""
    parts = []
    for (i, r), values in current.items():
        execution, decision = micro_step.executions[i], decisions[i]
        if decision is not None and len(values):
            behaviour = _behaviour([execution.rows[r]], values)
            losses = objective.token_losses(values, behaviour, execution.advantage, decision.keeps, config)
            parts.append(execution.weight * losses.sum())
    return torch.stack(parts).sum() if parts else None


def _behaviour(rows: Sequence[Row], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor([p for row in rows for p in row.logprobs], dtype=torch.float64, device=like.device)


def _finite(loss: torch.Tensor, micro_step: MicroStep) -> float:
    value = float(loss.detach())
    if value - value != 0.0:
        raise InvariantViolation(f"micro-step {micro_step.micro_step_id} has loss {value}: its gradient is not used")
    return value


def _result(
    micro_step: MicroStep,
    version: int,
    logprobs: dict[Entry, torch.Tensor],
    decisions: list[Decision | None],
    loss: float,
    scored: bool,
) -> MicroStepResult:
    gaps: list[float] = []
    for (i, r), values in logprobs.items():
        row = micro_step.executions[i].rows[r]
        for mine, recorded, sampled_at in zip(values.tolist(), row.logprobs, row.versions, strict=True):
            if sampled_at == version:
                gaps.append(abs(mine - recorded))
    made = [decision for decision in decisions if decision is not None]
    return MicroStepResult(
        loss=loss,
        targets=sum(len(row.targets) for execution in micro_step.executions for row in execution.rows),
        executions=len(micro_step.executions),
        clipped_executions=sum(not decision.keeps for decision in made),
        gap_count=len(gaps),
        gap_sum=sum(gaps),
        gap_max=max(gaps, default=0.0),
        ratio_max=max((decision.ratio_max for decision in made), default=0.0),
        scored=scored,
    )
