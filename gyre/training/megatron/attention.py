"""Attention over a pack: many sequences, or trees of sequences, laid out in one line of tokens.

A pack's tokens are split into nodes. A token attends to the tokens of its node up to itself and to everything in the
node's ancestors. A plain row is a node without ancestors, so rows and packed trees take the same path.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Node:
    """Tokens [start, end) of a pack and, nearest last, the token ranges of all ancestors."""

    start: int
    end: int
    ancestors: tuple[tuple[int, int], ...] = ()


class NodeParams(PackedSeqParams):  # type: ignore[misc]
    """Carries the nodes of a pack through Megatron's layers to the core attention.

    To Megatron the pack is one packed sequence of T tokens whose rotary angles are given for every token.
    """

    def __init__(self, nodes: tuple[Node, ...], device: torch.device) -> None:
        length = nodes[-1].end
        bounds = torch.tensor([0, length], dtype=torch.int32, device=device)
        super().__init__(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=length, max_seqlen_kv=length
        )
        self.nodes = nodes


class SdpaCore(torch.nn.Module):
    """Core attention of a Megatron layer: one scaled-dot-product call per node.

    One call per node beats one dense mask over the pack: the mask would make the kernel compute T² scores
    (notes/training.md §7).
    """

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
        out = torch.cat([self._node(node, q, k, v) for node in packed_seq_params.nodes], dim=2)
        return out[0].transpose(0, 1).flatten(1)

    def _node(self, node: Node, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ranges = (*node.ancestors, (node.start, node.end))
        keys = torch.cat([k[:, :, a:b] for a, b in ranges], dim=2)
        values = torch.cat([v[:, :, a:b] for a, b in ranges], dim=2)
        mask = None
        if node.ancestors:
            length, seen = node.end - node.start, keys.shape[2]
            mask = torch.ones(length, seen, dtype=torch.bool, device=q.device).tril(seen - length)
        return scaled_dot_product_attention(
            q[:, :, node.start : node.end],
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=True,
        )
