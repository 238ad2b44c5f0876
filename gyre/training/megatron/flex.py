"""Attention over a pack on CUDA: one FlexAttention kernel, whatever the shape of the trees.

Nodes lie in depth-first order, so a token's descendants are a range: token k is seen by the queries q with
k ≤ q < last[k]. That one number per token is the mask; which blocks of the score matrix are empty or full follows from
its minimum and maximum in a block, without the T² matrix that `create_block_mask` evaluates.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from gyre.training.megatron.nodes import TreeStretch

BLOCK = 128


def attend_flex(mask: BlockMask, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """An `Attend` over the pack that `mask` was made of. On a CPU only forward, and slow."""
    kernel: Any = flex_attention if q.device.type == "cpu" else _compiled()
    out: torch.Tensor = kernel(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
    return out


def tree_mask(nodes: Sequence[TreeStretch], device: torch.device) -> BlockMask:
    """The mask of a pack. `nodes` are in depth-first order and cover [0, T)."""
    last = last_descendants(nodes)
    blocks = -(-len(last) // BLOCK)
    padded = np.zeros(blocks * BLOCK, dtype=np.int64)
    padded[: len(last)] = last
    of_block = padded.reshape(blocks, BLOCK)
    query, key = np.arange(blocks)[:, None], np.arange(blocks)[None, :]
    full = (key < query) & (of_block.min(1)[None, :] >= (query + 1) * BLOCK)
    some = (key <= query) & (of_block.max(1)[None, :] > query * BLOCK) & ~full
    last_T = torch.from_numpy(last).to(device)

    def sees(_: torch.Tensor, __: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (q < last_T[k])

    return BlockMask.from_kv_blocks(
        *_ordered(some, device),
        *_ordered(full, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(len(last), len(last)),
    )


def last_descendants(nodes: Sequence[TreeStretch]) -> npt.NDArray[np.int64]:
    """For every token the end of the subtree of its node, [T]."""
    last = np.empty(nodes[-1].end, dtype=np.int64)
    for node in nodes:
        last[node.start : node.end] = node.end
        for start, end in node.ancestors:
            last[start:end] = node.end
    return last


def _ordered(chosen: npt.NDArray[np.bool_], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """FlexAttention's form of a block matrix: per row the number of chosen blocks, and their indices first."""
    counts = chosen.sum(1, dtype=np.int32)
    indices = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts)[None, None].to(device), torch.from_numpy(indices)[None, None].to(device)


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)
