"""Softmax attention over a pack: many sequences, or trees of sequences, laid out in one line of tokens.

A pack's tokens are split into nodes. A token attends to the tokens of its node up to itself and to everything in the
node's ancestors. A plain row is a node without ancestors, so rows and packed trees take the same path. Queries are
those of this context-parallel rank, keys and values those of the whole pack.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from gyre.training.megatron.layers.context import Query
from gyre.training.megatron.layers.flex import attend_flex, tree_mask
from gyre.training.megatron.layers.nodes import TreeStretch

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, torch.Tensor | None], torch.Tensor]
"""q [1, heads, C, dim], k and v [1, groups, T, dim], scale of the scores, a sink's logit per head or None →
[1, heads, C, dim of v]."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attention_over(
    nodes: Sequence[TreeStretch],
    queries: Sequence[Query],
    positions_T: torch.Tensor,
    window: int | None,
    index_C: torch.Tensor | None,
) -> Attend:
    """What attends over a pack on this device; made once a pack and window and used in every layer. `positions_T`: the
    depth of each token; `index_C`: indices of the queries, None for all tokens."""
    if positions_T.device.type == "cpu":
        return partial(_attend_on_cpu, tuple(queries), positions_T, window)
    return partial(attend_flex, tree_mask(nodes, positions_T, window, index_C))


def _attend_on_cpu(
    queries: tuple[Query, ...],
    positions_T: torch.Tensor,
    window: int | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    if window is None and sinks is None:
        return attend_flash(queries, q, k, v, scale)
    return attend_masked(queries, q, k, v, scale, sinks, positions_T, window)


def attend_masked(
    queries: Sequence[Query],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
    positions_T: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """The plain form that the others must equal: for each node one call over the keys of ancestors and node together.
    Runs on every device; tests and `benchmarks/gpu_check.py` compare with it."""
    outputs = []
    for query in queries:
        node = query.node
        ranges = (*node.ancestors, (node.start, node.end))
        seen = torch.cat([torch.arange(a, b, device=q.device) for a, b in ranges])
        keys, values = k.index_select(2, seen), v.index_select(2, seen)
        length = node.end - node.start
        mask = torch.ones(length, len(seen), dtype=torch.bool, device=q.device).tril(len(seen) - length)
        if window is not None and positions_T is not None:
            mask &= positions_T[node.start : node.end, None] - positions_T[seen] < window
        mine = q[:, :, query.start : query.start + length]
        if sinks is None:
            out = scaled_dot_product_attention(mine, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
        else:
            out = _with_sinks(mine, keys, values, scale, sinks, mask)
        outputs.append(out)
    return torch.cat(outputs, dim=2)


def _with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, sinks: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    repeats = q.shape[1] // k.shape[1]
    scores = (q @ k.repeat_interleave(repeats, 1).mT).float() * scale
    scores = scores.masked_fill(~mask, float("-inf"))
    sink = sinks.float()[None, :, None, None].expand(*scores.shape[:-1], 1)
    shares = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    return shares.to(v.dtype) @ v.repeat_interleave(repeats, 1)


def attend_flash(
    queries: tuple[Query, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """On a CPU, without masks and without copies of ancestors' keys: each ancestor range
    is attended to on its own and the partial results are merged by their log-sum-exp, as in ring attention."""
    width = v.shape[-1]
    if width < q.shape[-1]:
        # The kernel wants heads of one width.
        v = pad(v, (0, q.shape[-1] - width))
    out: torch.Tensor = _NodeFlash.apply(q, k, v, queries, scale)  # type: ignore[no-untyped-call]
    return out[..., :width]


class _NodeFlash(torch.autograd.Function):
    """Saves q, k, v, the output and one log-sum-exp a query, whatever the shape of the tree."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: tuple[Query, ...], scale: float
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for query in queries:
            node = query.node
            own, mine = slice(node.start, node.end), slice(query.start, query.start + node.end - node.start)
            asking = q[:, :, mine]
            o, total = _flash(asking, k[:, :, own], v[:, :, own], 0.0, True, scale=scale)
            for a, b in node.ancestors:
                part, part_lse = _flash(asking, k[:, :, a:b], v[:, :, a:b], 0.0, False, scale=scale)
                merged = torch.logaddexp(total, part_lse)
                o = o * (total - merged).exp()[..., None] + part * (part_lse - merged).exp()[..., None]
                total = merged
            out[:, :, mine], lse[:, :, mine] = o, total
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.queries, ctx.scale = queries, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        q, k, v, out, lse = ctx.saved_tensors
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for query in ctx.queries:
            node = query.node
            mine = slice(query.start, query.start + node.end - node.start)
            # With output and log-sum-exp of the whole row, the backward of a part is that part's exact share.
            whole = grad[:, :, mine], q[:, :, mine], out[:, :, mine], lse[:, :, mine]
            grad_q[:, :, mine] = 0.0
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
                grad_q[:, :, mine] += dq
                grad_k[:, :, a:b] += dk
                grad_v[:, :, a:b] += dv
        return grad_q, grad_k, grad_v, None, None
