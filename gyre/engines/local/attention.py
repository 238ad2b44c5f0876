"""Attention over a packed batch, one request at a time.

Continuous batching lays all requests of a pass end to end. Its `sdpa` path then attends with one dense mask over the
whole pass, so cost grows with (Σ queries)·(Σ keys): on a CPU, 16 decoding requests are slower than one. Here each
request attends to its own keys only, which needs no mask except for the later parts of a split prompt.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "gyre_packed"


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, ΣT_q, d]; key, value [1, kv_heads, ΣT_k, d]; cumulative lengths [requests + 1]; returns
    [1, ΣT_q, heads·d].

    Keys hold the request's whole context, queries its last T_q positions. Raises NotImplementedError for attention
    variants that change the formula (soft capping, sinks, sliding windows).
    """
    variants = [name for name in ("softcap", "s_aux", "sliding_window") if unused.get(name) is not None]
    if variants:
        raise NotImplementedError(f"{type(module).__name__} asks for {variants}: the local engine attends plainly")
    heads, kv_heads = query.shape[1], key.shape[1]
    ends_q, ends_k = cu_seq_lens_q.tolist(), cu_seq_lens_k.tolist()
    outputs = []
    for i in range(len(ends_q) - 1):
        q = query[:, :, ends_q[i] : ends_q[i + 1]]
        k, v = key[:, :, ends_k[i] : ends_k[i + 1]], value[:, :, ends_k[i] : ends_k[i + 1]]
        length_q, length_k = q.shape[2], k.shape[2]
        if length_q == 1:
            # One query sees every key: the query heads of a key head become query positions.
            grouped = q.reshape(1, kv_heads, heads // kv_heads, -1)
            output = scaled_dot_product_attention(grouped, k, v, scale=scaling)
            outputs.append(output.reshape(1, 1, -1))
            continue
        if length_q == length_k:
            output = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        else:
            mask = q.new_ones(length_q, length_k, dtype=torch.bool).tril_(length_k - length_q)
            output = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=True)
        outputs.append(output.transpose(1, 2).reshape(1, length_q, -1))
    return torch.cat(outputs, dim=1), None


AttentionInterface.register(NAME, packed_attention)
