"""Attention over a pack: many sequences, or trees of sequences, laid out in one line of tokens.

A pack's tokens are split into nodes. A token attends to the tokens of its node up to itself and to everything in the
node's ancestors. A plain row is a node without ancestors, so rows and packed trees take the same path.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn.functional import scaled_dot_product_attention

from gyre.training.megatron.flex import attend_flex, tree_mask
from gyre.training.megatron.nodes import TreeStretch

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""q [1, heads, T, dim], k and v [1, groups, T, dim], scale of the scores → [1, heads, T, dim]."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class NodeParams(PackedSeqParams):  # type: ignore[misc]
    """Carries the nodes of a pack through Megatron's layers to the core attention.

    To Megatron the pack is one packed sequence of T tokens whose rotary angles are given for every token.
    """

    def __init__(self, nodes: tuple[TreeStretch, ...], device: torch.device) -> None:
        length = nodes[-1].end
        bounds = torch.tensor([0, length], dtype=torch.int32, device=device)
        super().__init__(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=length, max_seqlen_kv=length
        )
        self.attend = attention_over(nodes, device)


def attention_over(nodes: tuple[TreeStretch, ...], device: torch.device) -> Attend:
    """What attends over a pack on this device; made once a pack and used in every layer."""
    if device.type == "cpu":
        return partial(attend_flash, nodes)
    return partial(attend_flex, tree_mask(nodes, device))


class NodeAttention(torch.nn.Module):
    """Core attention of a Megatron layer. Computes the scores inside the tree and no others: a dense mask over the
    pack would cost T² of them."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        packed_seq_params: NodeParams,
        **__: Any,
    ) -> torch.Tensor:
        """query [T, heads, dim], key and value [T, groups, dim] → [T, heads·dim]."""
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        return packed_seq_params.attend(q, k, v, self.scale)[0].transpose(0, 1).flatten(1)


def attend_masked(
    nodes: tuple[TreeStretch, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """The plain form that the others must equal: for each node one call over the keys of ancestors and node together.
    Runs on every device; tests and `benchmarks/gpu_check.py` compare with it."""
    outputs = []
    for node in nodes:
        ranges = (*node.ancestors, (node.start, node.end))
        keys, values = (torch.cat([x[:, :, a:b] for a, b in ranges], dim=2) for x in (k, v))
        mask = None
        if node.ancestors:
            length, seen = node.end - node.start, keys.shape[2]
            mask = torch.ones(length, seen, dtype=torch.bool, device=q.device).tril(seen - length)
        queries = q[:, :, node.start : node.end]
        outputs.append(
            scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )
        )
    return torch.cat(outputs, dim=2)


def attend_flash(
    nodes: tuple[TreeStretch, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """On a CPU, without masks and without copies of ancestors' keys: each ancestor range
    is attended to on its own and the partial results are merged by their log-sum-exp, as in ring attention."""
    return _NodeFlash.apply(q, k, v, nodes, scale)  # type: ignore[no-any-return, no-untyped-call]


class _NodeFlash(torch.autograd.Function):
    """Saves q, k, v, the output and one log-sum-exp a query, whatever the shape of the tree."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, nodes: tuple[TreeStretch, ...], scale: float
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for node in nodes:
            own = slice(node.start, node.end)
            queries = q[:, :, own]
            o, total = _flash(queries, k[:, :, own], v[:, :, own], 0.0, True, scale=scale)
            for a, b in node.ancestors:
                part, part_lse = _flash(queries, k[:, :, a:b], v[:, :, a:b], 0.0, False, scale=scale)
                merged = torch.logaddexp(total, part_lse)
                o = o * (total - merged).exp()[..., None] + part * (part_lse - merged).exp()[..., None]
                total = merged
            out[:, :, own], lse[:, :, own] = o, total
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.nodes, ctx.scale = nodes, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        q, k, v, out, lse = ctx.saved_tensors
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for node in ctx.nodes:
            own = slice(node.start, node.end)
            # With output and log-sum-exp of the whole row, the backward of a part is that part's exact share.
            whole = grad[:, :, own], q[:, :, own], out[:, :, own], lse[:, :, own]
            grad_q[:, :, own] = 0.0
            for a, b in (*node.ancestors, (node.start, node.end)):
                dq, dk, dv = _flash_backward(
                    whole[0],
                    whole[1],
                    k[:, :, a:b],
                    v[:, :, a:b],
                    whole[2],
                    whole[3],
                    0.0,
                    a == node.start,
                    scale=ctx.scale,
                )
                grad_q[:, :, own] += dq
                grad_k[:, :, a:b] += dk
                grad_v[:, :, a:b] += dv
        return grad_q, grad_k, grad_v, None, None
