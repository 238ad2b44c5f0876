"""Softmax attention of a layer: grouped heads, with the variants that families have, and latent heads.

Built in the place of Megatron's self-attention. Hidden states are [C / tp, 1, hidden] with sequence parallelism; the
shares of tensor-parallel ranks are whole heads. Shapes: `_C` tokens of this context-parallel rank.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch.nn.functional import linear

from gyre.training.megatron.layers.columns import Columns, Matrix, copies_of, shared_out
from gyre.training.megatron.layers.inputs import LayerInputs
from gyre.training.megatron.layers.norm import Norm
from gyre.training.models.architecture import Attention, Latent, Layer


def output_projection(config: Any, inputs: int, bias: bool = False) -> RowParallelLinear:
    """Sums over tensor-parallel ranks what their heads give."""
    return RowParallelLinear(
        inputs,
        config.hidden_size,
        config=config,
        init_method=config.init_method,
        bias=bias,
        input_is_parallel=True,
        skip_bias_add=False,
    )


def _attend(
    inputs: LayerInputs,
    layer: Layer,
    q_C: torch.Tensor,
    k_C: torch.Tensor,
    v_C: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[C, heads or groups, dim] → [C, heads, dim of v]."""
    k, v = (inputs.context.whole(x) for x in (k_C, v_C))
    q, k, v = (x.transpose(0, 1)[None] for x in (q_C, k, v))
    return inputs.attend(layer.window)(q, k, v, scale, sinks)[0].transpose(0, 1)


class GroupedAttention(torch.nn.Module):
    def __init__(self, config: Any, layer_number: int, **_: Any) -> None:
        super().__init__()
        sizes: Attention = config.architecture.attention
        self.sizes = sizes
        self.layer: Layer = config.architecture.layers[layer_number - 1]
        self.heads = shared_out("attention heads", sizes.heads)
        self.groups = max(1, sizes.groups * copies_of(sizes.groups) // (sizes.heads // self.heads))
        width = sizes.head_dim
        rows = {
            "q_proj": self.heads * width * (2 if sizes.gated else 1),
            "k_proj": self.groups * width,
            "v_proj": self.groups * width,
        }
        self.input = Columns(config, config.hidden_size, rows, sizes.qkv_bias)
        self.o_proj = output_projection(config, sizes.heads * width, sizes.output_bias)
        if sizes.qk_norm:
            self.q_norm = Norm(config, width, config.layernorm_epsilon)
            self.k_norm = Norm(config, width, config.layernorm_epsilon)
        self.sinks = None
        if sizes.sinks:
            device = torch.cuda.current_device()
            self.sinks = torch.nn.Parameter(torch.empty(self.heads, dtype=config.params_dtype, device=device))

    def forward(
        self, hidden: torch.Tensor, *_: Any, packed_seq_params: LayerInputs, **__: Any
    ) -> tuple[torch.Tensor, None]:
        sizes, inputs = self.sizes, packed_seq_params
        q, k, v = (x.squeeze(1).unflatten(-1, (-1, sizes.head_dim)) for x in self.input(hidden))
        gate = None
        if sizes.gated:
            q, gate = q.unflatten(1, (-1, 2)).unbind(2)
        if sizes.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        out = _attend(inputs, self.layer, inputs.rotate(q), inputs.rotate(k), v, sizes.head_dim**-0.5, self.sinks)
        if gate is not None:
            out = out * torch.sigmoid(gate)
        return self.o_proj(out.flatten(1)[:, None])[0], None


class LatentAttention(torch.nn.Module):
    """The low-rank projections are the same on all tensor-parallel ranks and see this rank's tokens; what they give is
    gathered and spread to the heads."""

    def __init__(self, config: Any, layer_number: int, **_: Any) -> None:
        super().__init__()
        sizes: Latent = config.architecture.latent
        self.sizes = sizes
        self.layer: Layer = config.architecture.layers[layer_number - 1]
        self.parallel = config.sequence_parallel
        self.heads = shared_out("attention heads", sizes.heads)
        self.width = sizes.nope_dim + sizes.rope_dim
        self.scale = self.width**-0.5 * config.latent_scale
        hidden, epsilon = config.hidden_size, 1e-6
        if sizes.query_rank is None:
            self.query = Columns(config, hidden, {"q_proj": self.heads * self.width})
        else:
            self.q_a_proj = Matrix(config, sizes.query_rank, hidden)
            self.q_a_layernorm = Norm(config, sizes.query_rank, epsilon)
            self.query = Columns(config, sizes.query_rank, {"q_b_proj": self.heads * self.width})
        self.kv_a_proj_with_mqa = Matrix(config, sizes.kv_rank + sizes.rope_dim, hidden)
        self.kv_a_layernorm = Norm(config, sizes.kv_rank, epsilon)
        self.key_value = Columns(config, sizes.kv_rank, {"kv_b_proj": self.heads * (sizes.nope_dim + sizes.value_dim)})
        self.o_proj = output_projection(config, sizes.heads * sizes.value_dim)

    def forward(
        self, hidden: torch.Tensor, *_: Any, packed_seq_params: LayerInputs, **__: Any
    ) -> tuple[torch.Tensor, None]:
        sizes, inputs = self.sizes, packed_seq_params
        low = hidden
        if sizes.query_rank is not None:
            low = self.q_a_layernorm(linear(hidden, self.q_a_proj.weight))
        (q,) = (x.squeeze(1).unflatten(-1, (self.heads, self.width)) for x in self.query(low))
        both = linear(hidden, self.kv_a_proj_with_mqa.weight)
        latent, turning = torch.split(both, [sizes.kv_rank, sizes.rope_dim], dim=-1)
        if self.parallel:
            turning = gather_from_sequence_parallel_region(turning)
        (kv,) = (x.squeeze(1).unflatten(-1, (self.heads, -1)) for x in self.key_value(self.kv_a_layernorm(latent)))
        k, v = torch.split(kv, [sizes.nope_dim, sizes.value_dim], dim=-1)
        q_still, q_turning = torch.split(q, [sizes.nope_dim, sizes.rope_dim], dim=-1)
        turned = inputs.rotate(turning, sizes.interleaved).expand(-1, self.heads, -1)
        q = torch.cat([q_still, inputs.rotate(q_turning, sizes.interleaved)], dim=-1)
        out = _attend(inputs, self.layer, q, torch.cat([k, turned], dim=-1), v, self.scale)
        return self.o_proj(out.flatten(1)[:, None])[0], None
