"""Attention over a packed batch, one request at a time.

Continuous batching lays all requests of a pass end to end. Its `sdpa` path then attends with one dense mask over the
whole pass, so cost grows with (Σ queries)·(Σ keys): on a CPU, 16 decoding requests are slower than one. Here each
request attends to its own keys only, which needs no mask except for the later parts of a split prompt, and its keys are
gathered into a small buffer that stays in the CPU's cache until they are used.
"""

import threading
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "gyre_packed"


class _Buffers(threading.local):
    """Keys and values of one request; one pair per generation thread."""

    pair: torch.Tensor | None = None

    def of(self, memory: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Two tensors [count, kv_heads, d], valid until the next call."""
        if self.pair is None or self.pair.shape[1] < count or self.pair.shape[2:] != memory.shape[1:]:
            # A quarter of room, so that a growing context does not reallocate in every pass.
            self.pair = memory.new_empty(2, count + count // 4, *memory.shape[1:])
        return self.pair[0, :count], self.pair[1, :count]


_buffers = _Buffers()


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
    read_index: list[torch.Tensor],
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, ΣT_q, d]; cumulative lengths [requests + 1]; read_index: memory slots of all keys, [ΣT_k], or
    empty when every key is in this pass; key, value [1, kv_heads, slots or ΣT_k, d]. Returns [1, ΣT_q, heads·d].

    A request's keys are its whole context, its queries the last T_q positions of it. Raises NotImplementedError for
    attention variants that change the formula (soft capping, sinks, sliding windows).
    """
    variants = [name for name in ("softcap", "s_aux", "sliding_window") if unused.get(name) is not None]
    if variants:
        raise NotImplementedError(f"{type(module).__name__} asks for {variants}: the local engine attends plainly")
    heads, kv_heads = query.shape[1], key.shape[1]
    ends_q, ends_k = cu_seq_lens_q.tolist(), cu_seq_lens_k.tolist()
    (slots,) = read_index
    memory_k, memory_v = key[0].transpose(0, 1), value[0].transpose(0, 1)
    outputs = []
    for i in range(len(ends_q) - 1):
        begin, end = ends_k[i], ends_k[i + 1]
        length_q, length_k = ends_q[i + 1] - ends_q[i], end - begin
        q = query[:, :, ends_q[i] : ends_q[i + 1]]
        if slots.numel() == 0:
            k, v = key[:, :, begin:end], value[:, :, begin:end]
        else:
            buffer_k, buffer_v = _buffers.of(memory_k, length_k)
            torch.index_select(memory_k, 0, slots[begin:end], out=buffer_k)
            torch.index_select(memory_v, 0, slots[begin:end], out=buffer_v)
            k, v = buffer_k.transpose(0, 1)[None], buffer_v.transpose(0, 1)[None]
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
