"""A mixture-of-experts layer as Qwen3-MoE has it: softmax router, top-k experts per token, no capacity limit, no
auxiliary loss.

Every tensor-parallel rank holds a slice of every expert, so nothing but the usual sum over ranks is communicated. Each
token is computed on its own: rows and packed trees give the same result.

With replay (docs/training.md, "Routing replay") the experts of a token are those that the rollout engine chose; their
weights are the trainer's own router shares, with gradient.

Shapes: `_T` tokens, `_N` = T·k token–expert pairs in the order of the experts.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from torch.nn.functional import grouped_mm, linear, silu

from gyre.core.expert_routing import sparse_layers


@dataclass(frozen=True)
class ExpertSizes:
    count: int
    chosen: int
    """Experts per token, k."""
    intermediate: int
    normalized: bool
    """Whether the k router weights of a token are divided by their sum."""
    layers: tuple[int, ...]
    """Layers, counted from 0, that have experts; the others have one ordinary MLP."""


def expert_sizes(hf: Any) -> ExpertSizes | None:
    """From a Hugging Face config; None for a model without experts."""
    if hf.model_type != "qwen3_moe":
        return None
    return ExpertSizes(
        count=hf.num_experts,
        chosen=hf.num_experts_per_tok,
        intermediate=hf.moe_intermediate_size,
        normalized=hf.norm_topk_prob,
        layers=tuple(sparse_layers(hf.num_hidden_layers, hf.mlp_only_layers, hf.decoder_sparse_step)),
    )


class SparseMlp(torch.nn.Module):
    """Takes the place of a Megatron layer's MLP. Parameters are left uninitialised."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.sizes: ExpertSizes = config.experts
        count, hidden = self.sizes.count, config.hidden_size
        part = self.sizes.intermediate // parallel_state.get_tensor_model_parallel_world_size()

        def empty(*shape: int) -> torch.nn.Parameter:
            device = torch.cuda.current_device()
            return torch.nn.Parameter(torch.empty(*shape, dtype=config.params_dtype, device=device))

        self.router = empty(count, hidden)
        self.gate_up = empty(count, 2, part, hidden)
        self.down = empty(count, hidden, part)
        self.replayed_Tk: torch.Tensor | None = None
        """Experts of the tokens of the next forward pass, −1 where the router chooses itself; None: everywhere."""

    def set_layer_number(self, number: int) -> None:
        """Megatron tells the layer, counted from 1 over all pipeline stages."""
        self.slot = self.sizes.layers.index(number - 1)

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """hidden [T, 1, hidden] → the same shape, and no bias."""
        tokens_T = hidden.flatten(0, 1)
        weights_Tk, chosen_Tk = self._route(tokens_T)
        # What follows is a part of each expert: the gradients that flow back out of it are summed over ranks.
        weights_Tk = copy_to_tensor_model_parallel_region(weights_Tk)
        tokens_T = copy_to_tensor_model_parallel_region(tokens_T)
        output_T = reduce_from_tensor_model_parallel_region(self._mix(tokens_T, weights_Tk, chosen_Tk))
        return output_T.view_as(hidden), None

    def _route(self, tokens_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # In fp32 whatever the precision: rounding here sends tokens to other experts.
        with torch.autocast(tokens_T.device.type, enabled=False):
            shares = linear(tokens_T.float(), self.router).softmax(-1)
        weights_Tk, chosen_Tk = shares.topk(self.sizes.chosen)
        if self.replayed_Tk is not None:
            chosen_Tk = torch.where(self.replayed_Tk < 0, chosen_Tk, self.replayed_Tk)
            weights_Tk = shares.gather(-1, chosen_Tk)
        if self.sizes.normalized:
            weights_Tk = weights_Tk / weights_Tk.sum(-1, keepdim=True)
        return weights_Tk.to(tokens_T.dtype), chosen_Tk

    def _mix(self, tokens_T: torch.Tensor, weights_Tk: torch.Tensor, chosen_Tk: torch.Tensor) -> torch.Tensor:
        """Σ over the chosen experts. Pairs are permuted and never accumulated by index: CUDA would add in any order,
        and tensor-parallel ranks must agree bit by bit."""
        order_N = chosen_Tk.flatten().argsort(stable=True)
        ends = chosen_Tk.flatten().bincount(minlength=self.sizes.count).cumsum(0).to(torch.int32)
        pairs_N = tokens_T[:, None].expand(-1, self.sizes.chosen, -1).flatten(0, 1)[order_N]
        gate_N, up_N = _products(pairs_N, self.gate_up.flatten(1, 2), ends).chunk(2, dim=-1)
        output_N = _products(silu(gate_N) * up_N, self.down, ends)
        output_Tk = output_N[order_N.argsort()].view(*chosen_Tk.shape, -1)
        return (output_Tk * weights_Tk[..., None]).sum(1)


def _products(inputs_N: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """inputs [N, in] times each pair's expert of weights [experts, out, in], in the precision of the forward pass."""
    kind = inputs_N.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weights.dtype
    return grouped_mm(inputs_N.to(dtype), weights.to(dtype).mT, offs=ends)
