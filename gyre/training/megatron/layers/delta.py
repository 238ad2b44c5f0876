"""Gated DeltaNet over a pack: linear attention whose state and convolution run along each path of a tree.

A branch starts from its parent's recurrent state and from the last inputs of its parent's convolution, so a prefix that
several rows share is computed once, with the gradient of all of them. With context parallelism a rank has some heads of
all tokens (`context.py`); with tensor parallelism it has whole key heads with their value heads.

Shapes: `_C` tokens of this context-parallel rank, `_T` tokens of the pack.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch.nn.functional import conv1d, pad, silu, softplus
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from gyre.training.megatron.layers.attention import output_projection
from gyre.training.megatron.layers.columns import Columns, shared_out
from gyre.training.megatron.layers.inputs import LayerInputs
from gyre.training.megatron.layers.nodes import TreeStretch
from gyre.training.megatron.layers.norm import Norm
from gyre.training.models.architecture import DeltaNet


class GatedDeltaNet(torch.nn.Module):
    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        sizes: DeltaNet = config.architecture.delta
        self.sizes = sizes
        self.keys = shared_out("linear attention key heads", sizes.key_heads)
        self.each = sizes.value_heads // sizes.key_heads
        """Value heads of a key head."""
        parts = parallel_state.get_context_parallel_world_size()
        if self.keys % parts:
            raise ValueError(f"{self.keys} linear attention key heads of a rank cannot be shared out to {parts} ranks")
        values = self.keys * self.each
        qk, v = self.keys * sizes.key_dim, values * sizes.value_dim
        rows = {"in_proj_qkvz": 2 * qk + 2 * v, "in_proj_ba": 2 * values}
        if not sizes.fused:
            rows = {"in_proj_qkv": 2 * qk + v, "in_proj_z": v, "in_proj_b": values, "in_proj_a": values}
        self.input = Columns(config, config.hidden_size, rows)
        like = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.conv1d = torch.nn.Parameter(torch.empty(2 * qk + v, 1, sizes.kernel, **like))
        self.A_log = torch.nn.Parameter(torch.empty(values, **like))
        self.dt_bias = torch.nn.Parameter(torch.empty(values, **like))
        self.norm = Norm(config, sizes.value_dim, config.layernorm_epsilon, offset=0.0)
        self.out_proj = output_projection(config, sizes.value_heads * sizes.value_dim)

    def forward(
        self, hidden: torch.Tensor, *_: Any, packed_seq_params: LayerInputs, **__: Any
    ) -> tuple[torch.Tensor, None]:
        context = packed_seq_params.context
        mixed_C, z = self._project(hidden)
        part, parts = context.part
        mixed = context.all_tokens(mixed_C.reshape(len(mixed_C), parts, -1))
        out_T = self._mix(mixed.view(len(mixed), self.keys // parts, -1), packed_seq_params.nodes, part, parts)
        out = context.own_tokens(out_T.flatten(1)).reshape(len(z), -1, self.sizes.value_dim)
        out = self.norm(out) * silu(z.float()).type_as(out)
        return self.out_proj(out.flatten(1)[:, None])[0], None

    def _project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Per key head what mixes tokens (q, k, its values, b, a), [C, keys, ·], and the gate [C, values, dim]."""
        sizes, keys, each = self.sizes, self.keys, self.each
        wide = each * sizes.value_dim
        if sizes.fused:
            qkvz, ba = (x.squeeze(1).unflatten(-1, (keys, -1)) for x in self.input(hidden))
            qkv, z = torch.split(qkvz, [2 * sizes.key_dim + wide, wide], dim=-1)
            mixed = torch.cat([qkv, ba], dim=-1)
        else:
            qkv, z, b, a = (x.squeeze(1) for x in self.input(hidden))
            q, k, v = torch.split(qkv, [keys * sizes.key_dim, keys * sizes.key_dim, keys * wide], dim=-1)
            mixed = torch.cat([x.unflatten(-1, (keys, -1)) for x in (q, k, v, b, a)], dim=-1)
        return mixed, z.reshape(len(z), -1, sizes.value_dim)

    def _mix(self, mixed: torch.Tensor, nodes: Sequence[TreeStretch], part: int, parts: int) -> torch.Tensor:
        """[T, key heads of this rank, ·] → [T, their value heads, dim]."""
        sizes = self.sizes
        widths = [sizes.key_dim, sizes.key_dim, self.each * sizes.value_dim, self.each, self.each]
        *qkv, b, a = torch.split(mixed, widths, dim=-1)
        inputs = torch.cat([x.flatten(1) for x in qkv], dim=-1)
        kernel = self._kernel(widths[:3], part, parts)
        decay, shift = (x.chunk(parts)[part].float() for x in (self.A_log, self.dt_bias))
        g = -decay.exp() * softplus(a.flatten(1).float() + shift)
        beta = b.flatten(1).sigmoid()
        heads = mixed.shape[1]
        left: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By the end of a node with children: its recurrent state and its last inputs of the convolution."""
        parents = {node.ancestors[-1][1] for node in nodes if node.ancestors}
        outputs = []
        for node in nodes:
            here = slice(node.start, node.end)
            state, tail = left[node.ancestors[-1][1]] if node.ancestors else (None, None)
            x = inputs[here].T[None]
            x = pad(x, (sizes.kernel - 1, 0)) if tail is None else torch.cat([tail, x], dim=-1)
            y = silu(conv1d(x, kernel, groups=len(kernel)))[0].T
            q, k, v = torch.split(y, [heads * width for width in widths[:3]], dim=-1)
            out, state = torch_chunk_gated_delta_rule(
                q.reshape(1, len(q), heads, -1),
                k.reshape(1, len(k), heads, -1),
                v.reshape(1, len(v), -1, sizes.value_dim),
                g=g[None, here],
                beta=beta[None, here],
                initial_state=state,
                output_final_state=node.end in parents,
                use_qk_l2norm_in_kernel=True,
            )
            if node.end in parents:
                left[node.end] = state, x[..., -(sizes.kernel - 1) :]
            outputs.append(out[0])
        return torch.cat(outputs).to(mixed.dtype)

    def _kernel(self, widths: Sequence[int], part: int, parts: int) -> torch.Tensor:
        """The filters of this rank's heads: each of q, k and v is shared out on its own."""
        whole = torch.split(self.conv1d, [self.keys * width for width in widths])
        return torch.cat([x.chunk(parts)[part] for x in whole])
