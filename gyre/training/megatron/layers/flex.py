"""Attention over a pack on CUDA: one FlexAttention kernel, whatever the shape of the trees.

Nodes lie in depth-first order, so a token's descendants are a range: token k is seen by the queries q with
k ≤ q < last[k], where q is a query's index in the pack, whichever rank computes it. That one number per token is the
mask; which blocks of the score matrix are empty or full follows from its minimum and maximum in a block, without the T²
matrix that `create_block_mask` evaluates.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from gyre.training.megatron.layers.nodes import TreeStretch

BLOCK = 128


def attend_flex(
    mask: BlockMask, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """An `Attend` over the pack that `mask` was made of. On a CPU only forward, and slow."""
    kernel: Any = flex_attention if q.device.type == "cpu" else _compiled()
    if sinks is None:
        out: torch.Tensor = kernel(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
        return out
    aux = AuxRequest(lse=True)
    out, told = kernel(q, k, v, block_mask=mask, scale=scale, enable_gqa=True, return_aux=aux)
    # A sink takes its share of every query's softmax.
    return out * torch.sigmoid(told.lse - sinks.float()[None, :, None])[..., None].to(out.dtype)


def tree_mask(
    nodes: Sequence[TreeStretch],
    positions_T: torch.Tensor,
    window: int | None = None,
    index_C: torch.Tensor | None = None,
) -> BlockMask:
    """The mask of a pack. `nodes` are in depth-first order and cover [0, T); `index_C` are the indices of the queries,
    ascending, None for all tokens. With a window a query sees keys of less than `window` positions before it."""
    device = positions_T.device
    last = last_descendants(nodes)
    count = len(last)
    index = np.arange(count) if index_C is None else index_C.cpu().numpy()
    of_block = _blocks(last, 0)
    first, final = _blocks(index, index[-1]).min(1)[:, None], _blocks(index, index[-1]).max(1)[:, None]
    # What fills up the last block of queries, or of keys, has no keys or no descendants: it is in no full block.
    beyond = _blocks(index, count).max(1)[:, None]
    key = np.arange(len(of_block))[None, :]
    full = ((key + 1) * BLOCK <= first + 1) & (of_block.min(1)[None, :] > beyond)
    some = (key * BLOCK <= final) & (of_block.max(1)[None, :] > first)
    if window is not None:
        positions = positions_T.cpu().numpy()
        asked = _blocks(positions[index], positions[index[-1]])
        # A block may hold the starts of several rows: only its largest position bounds it.
        some &= asked.min(1)[:, None] - _blocks(positions, positions[-1]).max(1)[None, :] < window
        full &= asked.max(1)[:, None] - _blocks(positions, positions[-1]).min(1)[None, :] < window
        full &= some
    some &= ~full
    last_T = torch.from_numpy(last).to(device)
    asks_C = torch.from_numpy(index).to(device)

    def sees(_: torch.Tensor, __: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        query = asks_C[q]
        seen = (k <= query) & (query < last_T[k])
        return seen if window is None else seen & (positions_T[query] - positions_T[k] < window)

    return BlockMask.from_kv_blocks(
        *_ordered(some, device),
        *_ordered(full, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(len(index), count),
    )


def _blocks(values: npt.NDArray[Any], fill: Any) -> npt.NDArray[Any]:
    """[blocks, BLOCK], filled up at the end."""
    blocks = -(-len(values) // BLOCK)
    padded = np.full(blocks * BLOCK, fill, dtype=values.dtype)
    padded[: len(values)] = values
    return padded.reshape(blocks, BLOCK)


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
