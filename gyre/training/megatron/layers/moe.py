"""Sparse layers: Megatron's `MoELayer` with its dispatcher, and what Gyre puts into it.

* `ReplayRouter` is Megatron's router with the experts of a recorded rollout (docs/training.md,
  "Expert routing replay") and
  with a frozen correction bias: reinforcement learning does not balance load.
* `GroupedExperts` multiplies with torch's grouped product: Megatron's own needs CUDA packages. A rank holds whole
  experts, `count / expert-parallel ranks` of them; the tokens come to it by Megatron's all-to-all.

There is no capacity limit and no auxiliary loss: each token is computed on its own, so packed trees hold here too.

Shapes: `_T` tokens of this rank, `_N` token–expert pairs in the order of this rank's experts.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from torch.nn.functional import grouped_mm, silu

from gyre.training.models.architecture import Experts


class Choice:
    """What Megatron's router asks instead of choosing by itself."""

    def __init__(self, experts: Experts) -> None:
        self._groups = (experts.groups, experts.chosen_groups)
        self.chosen_Tk: torch.Tensor | None = None
        """Experts of the tokens of this rank, −1 where the router chooses itself; None: everywhere."""

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, _: int | None, __: int | None, ___: Callable[..., Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """scores [T, experts] → scores and numbers of the chosen, [T, k] each."""
        own_Tk = self._best_groups(scores).topk(topk, dim=1).indices
        if self.chosen_Tk is None:
            return scores.gather(1, own_Tk), own_Tk
        chosen_Tk = torch.where(self.chosen_Tk < 0, own_Tk, self.chosen_Tk)
        return scores.gather(1, chosen_Tk), chosen_Tk

    def _best_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores, −∞ outside the groups whose two best experts have the largest sum."""
        count, chosen = self._groups
        if count == 1:
            return scores
        of_group = scores.view(len(scores), count, -1)
        best = of_group.topk(min(2, of_group.shape[-1]), dim=-1).values.sum(-1).topk(chosen, dim=-1).indices
        kept = torch.zeros(len(scores), count, dtype=torch.bool, device=scores.device).scatter(1, best, True)
        return of_group.masked_fill(~kept[..., None], float("-inf")).flatten(1)


class ReplayRouter(TopKRouter):  # type: ignore[misc]
    def __init__(self, config: Any, pg_collection: Any = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        experts: Experts = config.architecture.experts
        self.choice = Choice(experts)
        device = torch.cuda.current_device()
        self.weight.data = self.weight.data.to(device)
        if experts.router_bias:
            self.bias = torch.nn.Parameter(torch.empty(experts.count, dtype=config.params_dtype, device=device))
        if experts.correction:
            self.register_buffer("correction", torch.empty(experts.count, dtype=torch.float32, device=device))
        self._experts = experts

    def routing(self, logits: torch.Tensor, **_: Any) -> Any:
        experts = self._experts
        return topk_routing_with_score_function(
            logits.view(-1, experts.count),
            experts.chosen,
            use_pre_softmax=not experts.normalized,
            scaling_factor=None if experts.scaling == 1.0 else experts.scaling,
            score_function=experts.score,
            expert_bias=self.correction if experts.correction else None,
            router_replay=self.choice,
        )


class GroupedExperts(torch.nn.Module):
    """This rank's experts, as files have them. Parameters are left uninitialised."""

    def __init__(self, num_local_experts: int, config: Any, **_: Any) -> None:
        super().__init__()
        experts: Experts = config.architecture.experts
        inner, hidden, count = experts.intermediate, config.hidden_size, num_local_experts
        self.clamped = experts.clamped
        like = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}

        def empty(*shape: int) -> torch.nn.Parameter:
            parameter = torch.nn.Parameter(torch.empty(*shape, **like))
            # To Megatron: its gradient is summed over the ranks that have the same experts, and no others.
            parameter.allreduce = False  # type: ignore[attr-defined]
            return parameter

        if self.clamped is None:
            self.gate_up, self.down = empty(count, 2 * inner, hidden), empty(count, hidden, inner)
        else:
            self.gate_up, self.down = empty(count, hidden, 2 * inner), empty(count, inner, hidden)
            self.gate_up_bias, self.down_bias = empty(count, 2 * inner), empty(count, hidden)

    def forward(
        self, input_N: torch.Tensor, tokens_per_expert: torch.Tensor, probs_N: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """input [N, hidden], tokens_per_expert [experts of this rank], probs [N] → [N, hidden], and no bias."""
        if not len(input_N):
            # Part of the graph all the same: the backward pass of every rank runs through both exchanges.
            return input_N * probs_N[:, None], None
        counts = tokens_per_expert.to(input_N.device)
        ends = counts.cumsum(0).to(torch.int32)
        if self.clamped is None:
            gate_N, up_N = _products(input_N, self.gate_up.mT, ends).chunk(2, dim=-1)
            output_N = _products(silu(gate_N) * up_N, self.down.mT, ends)
        else:
            inner_N = _products(input_N, self.gate_up, ends) + _spread(self.gate_up_bias, counts)
            output_N = _products(_clamped(inner_N, *self.clamped), self.down, ends)
            output_N = output_N + _spread(self.down_bias, counts)
        return (output_N * probs_N[:, None]).to(input_N.dtype), None


def _products(inputs_N: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """inputs [N, in] times each pair's expert of weights [experts, in, out]."""
    return grouped_mm(inputs_N.to(weights.dtype), weights, offs=ends)


def _spread(bias: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """[experts, width] → [N, width]. In fp32 on the way, in which the gradients of an expert's tokens are added up."""
    return bias.float().repeat_interleave(counts, 0).to(bias.dtype)


def _clamped(gate_up_N: torch.Tensor, gain: float, limit: float) -> torch.Tensor:
    gate_N = gate_up_N[..., ::2].clamp(max=limit)
    up_N = gate_up_N[..., 1::2].clamp(min=-limit, max=limit)
    return (up_N + 1) * gate_N * torch.sigmoid(gate_N * gain)


def moe_spec() -> ModuleSpec:
    """What takes the place of a layer's MLP."""
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            router=ReplayRouter,
            experts=GroupedExperts,
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=linear),
        ),
    )


def moe_settings(experts: Experts, expert_parallel: int) -> dict[str, Any]:
    """Megatron's fields for a model with such experts."""
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.intermediate,
        "moe_router_topk": experts.chosen,
        # Only to satisfy Megatron's checks: the router's own fields are in `ReplayRouter`.
        "moe_router_pre_softmax": True,
        # Whatever the precision: rounding in the router sends tokens to other experts.
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "moe_shared_expert_intermediate_size": experts.shared or None,
        "moe_shared_expert_gate": experts.shared_gate,
        "expert_model_parallel_size": expert_parallel,
        "expert_tensor_parallel_size": 1,
    }
