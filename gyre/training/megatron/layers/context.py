"""Context parallelism: which tokens of a pack each rank computes, and what they exchange.

A pack is cut into `2 · _FINE` blocks a rank of equal length. Ranks take equally many blocks, so all but attention costs
the same everywhere, and they take them so that the areas of the mask (score entries of a block's queries) are about
equal. Softmax attention gathers keys and values and computes the rank's own queries; its gradient is summed and cut.
Linear attention runs over all tokens, so there a rank exchanges "all heads of my tokens" for "my heads of all tokens".

Shapes: `_T` tokens of the pack, `_C` tokens of this rank.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import all_to_all

from gyre.training.megatron.layers.nodes import TreeStretch, cut

_FINE = 8


@dataclass(frozen=True)
class Share:
    """Tokens of a pack by rank. `ranges[r]` are those of rank r, ascending; all ranks have equally many."""

    ranges: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def tokens(self) -> int:
        return sum(b - a for a, b in self.ranges[0])


def share_out(nodes: Sequence[TreeStretch], ranks: int, multiple: int) -> Share:
    """Shares [0, T) out to `ranks`. T is a multiple of `ranks · multiple`, and every rank's part one of `multiple`."""
    length = nodes[-1].end
    if ranks == 1:
        return Share((((0, length),),))
    units = length // (ranks * multiple)
    blocks = next(n for n in range(min(2 * _FINE, units), 0, -1) if units % n == 0) * ranks
    size = length // blocks
    areas = [0] * blocks
    for piece in cut(nodes, range(0, length, size)):
        areas[piece.start // size] += piece.seen
    free = [(0, rank) for rank in range(ranks)]
    taken: list[list[int]] = [[] for _ in range(ranks)]
    for block in sorted(range(blocks), key=lambda b: -areas[b]):
        area, rank = heapq.heappop(free)
        taken[rank].append(block)
        if len(taken[rank]) < blocks // ranks:
            heapq.heappush(free, (area + areas[block], rank))
    return Share(tuple(_joined(sorted(mine), size) for mine in taken))


def _joined(blocks: Sequence[int], size: int) -> tuple[tuple[int, int], ...]:
    ranges: list[tuple[int, int]] = []
    for block in blocks:
        start = ranges.pop()[0] if ranges and ranges[-1][1] == block * size else block * size
        ranges.append((start, (block + 1) * size))
    return tuple(ranges)


class Context:
    """This rank's part of a pack, and the exchanges with the ranks that have the rest."""

    def __init__(self, nodes: Sequence[TreeStretch], multiple: int, device: torch.device) -> None:
        self.size = parallel_state.get_context_parallel_world_size()
        self._rank = parallel_state.get_context_parallel_rank()
        self._group: Any = parallel_state.get_context_parallel_group()
        share = share_out(nodes, self.size, multiple)
        self.tokens = share.tokens
        """C."""
        order = torch.cat([torch.arange(a, b) for ranges in share.ranges for a, b in ranges])
        self.index_C = order.view(self.size, -1)[self._rank].to(device)
        """Index in the pack of each token of this rank, ascending."""
        self._from_ranks = torch.empty_like(order).scatter(0, order, torch.arange(len(order))).to(device)
        self._to_ranks = order.to(device)
        bounds = [bound for pair in share.ranges[self._rank] for bound in pair]
        self.queries = queries_of(cut(nodes, bounds), share.ranges[self._rank])

    def whole(self, x_C: torch.Tensor) -> torch.Tensor:
        """[C, …] of all ranks in the order of the pack, [T, …]; the gradient is summed over ranks."""
        if self.size == 1:
            return x_C
        gathered: torch.Tensor = _Gather.apply(x_C, self._group, self.size)  # type: ignore[no-untyped-call]
        return gathered.index_select(0, self._from_ranks)

    def all_tokens(self, x_C: torch.Tensor) -> torch.Tensor:
        """[C, size, …], the second axis being what each rank gets → this rank's of all tokens, [T, …]."""
        if self.size == 1:
            return x_C[:, 0]
        received: torch.Tensor = all_to_all(self._group, x_C.transpose(0, 1).flatten(0, 1).contiguous())
        return received.index_select(0, self._from_ranks)

    def own_tokens(self, x_T: torch.Tensor) -> torch.Tensor:
        """The inverse: [T, …] → [C, size, …]."""
        if self.size == 1:
            return x_T[:, None]
        received: torch.Tensor = all_to_all(self._group, x_T.index_select(0, self._to_ranks))
        return received.view(self.size, -1, *received.shape[1:]).transpose(0, 1)

    @property
    def part(self) -> tuple[int, int]:
        """Which part of the heads this rank has in `all_tokens`: number and count."""
        return self._rank, self.size

    def scattered(self, values: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
        """Fills [count] from every rank's `values` at `index`, which share it out; gradient flows to the own ones."""
        if self.size == 1:
            return values if len(values) == count else values.new_zeros(count).index_copy(0, index, values)
        return _Scatter.apply(values, index, count, self._group)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True)
class Query:
    """Consecutive tokens of one rank: where they begin among its tokens, and what they are in the pack."""

    start: int
    node: TreeStretch


def queries_of(nodes: Sequence[TreeStretch], ranges: Sequence[tuple[int, int]]) -> tuple[Query, ...]:
    """`nodes` are cut at the bounds of `ranges`."""
    found, begin = [], 0
    for a, b in ranges:
        found += [Query(begin + node.start - a, node) for node in nodes if a <= node.start and node.end <= b]
        begin += b - a
    return tuple(found)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, size: int) -> torch.Tensor:
        ctx.group, ctx.size = group, size
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.size)[dist.get_rank(ctx.group)].contiguous(), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, index: torch.Tensor, count: int, group: Any) -> torch.Tensor:
        ctx.save_for_backward(index)
        whole = values.new_zeros(count).index_copy(0, index, values)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return grads[0][index], None, None, None
