"""The execution-level objective of the paper (Eq. 5–6) as pure functions of tensors.

Shape suffix `_U`: targets of *one execution*, in any fixed order over all its rows; U = L_i unless a function says that
it takes any subset. Nothing here knows rows: the result depends on the target set alone.
"""

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    # Configurations are read where nothing trains, and torch is not installed.
    import torch


class ObjectiveConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants of Eq. 5–6; the defaults are the paper's."""

    ratio_cap: Annotated[float, Meta(gt=0)] = 5.0
    """Upper bound of a token's importance ratio ρ_u."""
    clip_low: Annotated[float, Meta(ge=0, le=1)] = 0.995
    """With a negative advantage, an execution whose mean ratio s_i is below this gets no gradient."""
    clip_high: Annotated[float, Meta(ge=1)] = 1.005
    """With a positive advantage, an execution whose mean ratio s_i is above this gets no gradient."""
    loss_cap: Annotated[float, Meta(gt=0)] = 100.0
    """Upper bound of a token's loss ℓ_u."""


def log_ratios(logprobs_U: "torch.Tensor", behaviour_U: "torch.Tensor") -> "torch.Tensor":
    """log ρ_u = log π_θ − log p^roll per target, [U], fp64, no gradient. Takes any subset of targets."""
    return logprobs_U.detach().double() - behaviour_U.double()


def sequence_ratio(log_ratios_U: "torch.Tensor") -> float:
    """s_i, the geometric mean of ρ over *all* targets of an execution, U = L_i ≥ 1."""
    return float(log_ratios_U.mean().exp())


def keeps_gradient(ratio: float, advantage: float, config: ObjectiveConfig) -> bool:
    """m_i: False when the execution has already moved past the clip edge in the direction of its advantage. Values on
    an edge are kept."""
    if advantage > 0:
        return ratio <= config.clip_high
    if advantage < 0:
        return ratio >= config.clip_low
    return True


def token_losses(
    logprobs_U: "torch.Tensor", behaviour_U: "torch.Tensor", advantage: float, keeps: bool, config: ObjectiveConfig
) -> "torch.Tensor":
    """ℓ_u = min{loss_cap, −m_i · sg(min{ρ_u, ratio_cap}) · Â_i · log π_θ}, [U], in the dtype of `logprobs_U`.

    Takes any subset of an execution's targets. The gradient flows through `logprobs_U` only, and not at all where the
    loss cap is active.
    """
    ratios_U = log_ratios(logprobs_U, behaviour_U).exp().clamp(max=config.ratio_cap)
    coefficients_U = (-float(keeps) * advantage) * ratios_U
    return (coefficients_U.to(logprobs_U.dtype) * logprobs_U).clamp(max=config.loss_cap)
