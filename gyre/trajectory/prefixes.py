"""What a set of rows costs when prefixes that several of them begin with are computed once (DESIGN §6 "packed-tree").

The count is the trainer's layout to the token: a row counts up to the last token that predicts a target, and a shared
stretch shorter than `MIN_SHARED` is computed again in every row.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from gyre.trajectory.microstep import Row

MIN_SHARED = 16
"""Shorter common stretches are computed again: the extra attention calls would cost more than the tokens."""
ATTENTION_BREAK_EVEN = 16384
"""Row length at which attention costs as much as the rest of a layer (about 6 × hidden size of a mid-size model)."""


class Size(msgspec.Struct, frozen=True):
    tokens: int
    """Tokens of one forward pass."""
    cost: float
    """Relative compute: linear layers 1 per token, attention 2·depth / ATTENTION_BREAK_EVEN per token, so that a row of
    its own costs n + n² / ATTENTION_BREAK_EVEN."""

    def __add__(self, other: "Size") -> "Size":
        return Size(self.tokens + other.tokens, self.cost + other.cost)


class SharedRows:
    """Rows of one group, named by their index; sizes of any subset. With `share_prefixes` false, every row is computed
    whole."""

    def __init__(self, rows: Sequence[Row], share_prefixes: bool = True) -> None:
        used = [np.array(row.ids_T[: row.targets[-1]] if row.targets else [], dtype=">u4") for row in rows]
        order = sorted(range(len(used)), key=lambda r: used[r].tobytes())
        self._lengths = [len(used[r]) for r in order]
        shared = [_common(used[a], used[b]) if share_prefixes else 0 for a, b in pairwise(order)]
        self._common = np.array(shared, dtype=np.int64)
        self._rank = {row: rank for rank, row in enumerate(order)}

    def ordered(self, rows: Iterable[int]) -> list[int]:
        """Rows that begin alike next to each other."""
        return sorted(rows, key=self._rank.__getitem__)

    def shares(self, row: int) -> bool:
        """Whether the row begins like any other row, far enough to be computed once."""
        rank = self._rank[row]
        return bool(len(self._common)) and int(max(self._common[max(rank - 1, 0) : rank + 1])) >= MIN_SHARED

    def size(self, rows: Iterable[int]) -> Size:
        """Of one forward pass over these rows."""
        ranks = [rank for rank in sorted(map(self._rank.__getitem__, rows)) if self._lengths[rank]]
        if not ranks:
            return Size(0, 0.0)
        common = np.minimum.reduceat(self._common[: ranks[-1]], ranks[:-1]).tolist() if len(ranks) > 1 else []
        lengths = [self._lengths[rank] for rank in ranks]
        tokens = squares = 0
        branches = [(0, len(ranks), 0)]  # rows [first, last) below a depth that is laid out
        while branches:
            first, last, depth = branches.pop()
            end = min(common[first : last - 1], default=lengths[first])
            if end > depth and (last - first == 1 or end - depth >= MIN_SHARED):
                tokens += end - depth
                squares += end * end - depth * depth
                depth = end
            if last - first > 1:
                cuts = [i + 1 for i in range(first, last - 1) if common[i] == end]
                branches += [(a, b, depth) for a, b in pairwise([first, *cuts, last])]
        return Size(tokens, tokens + squares / ATTENTION_BREAK_EVEN)


def _common(a: npt.NDArray[np.uint32], b: npt.NDArray[np.uint32]) -> int:
    """Length of the common prefix."""
    length = min(len(a), len(b))
    different = np.nonzero(a[:length] != b[:length])[0]
    return int(different[0]) if len(different) else length
