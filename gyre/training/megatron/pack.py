"""One forward pass: rows laid out in a line of tokens, with the places where their targets are predicted.

With shared prefixes the rows become trees: a prefix that several rows begin with is laid out, and computed, once. Equal
ids at equal positions after equal ids have equal hidden states, so loss and gradients are those of separate rows
(packed-tree training, DESIGN §6).

Shapes: `_T` tokens of the pack, `_U` targets of the pack (row after row, ascending inside a row).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from gyre.training.megatron.nodes import Node
from gyre.trajectory.microstep import Row
from gyre.trajectory.prefixes import MIN_SHARED

Ints = npt.NDArray[np.int64]
_Branch = tuple[Sequence[int], Sequence[int], int, tuple[tuple[int, int], ...]]
"""Rows, the prefix lengths that neighbours share, the depth that is laid out, and the nodes above."""


@dataclass(frozen=True)
class Pack:
    ids_T: torch.Tensor
    """Token ids, int64."""
    positions_T: torch.Tensor
    """Position of each token in its row, int64."""
    nodes: tuple[Node, ...]
    """In depth-first order, covering [0, T)."""
    predictors_U: torch.Tensor
    """Index in the pack of the token whose hidden state predicts each target, int64."""
    targets_U: torch.Tensor
    """Token id of each target, int64."""
    row_targets: tuple[int, ...]
    """Number of targets of each row, in the order given; sums to U."""

    @property
    def tokens(self) -> int:
        return self.ids_T.shape[0]


def pack_rows(rows: Sequence[Row], share_prefixes: bool, device: torch.device) -> Pack:
    """Lays out the tokens that predict something: nothing from a row's last target on, no row without targets."""
    used = [np.array(row.ids_T[: row.targets[-1]] if row.targets else [], dtype=np.int64) for row in rows]
    layout = _Layout(used)
    alive = [r for r, ids in enumerate(used) if len(ids)]
    if share_prefixes and alive:
        alive.sort(key=lambda r: rows[r].ids_T[: rows[r].targets[-1]])
        layout.add(alive, [_common(used[a], used[b]) for a, b in pairwise(alive)])
    else:
        for r in alive:
            layout.add([r], [])
    predictors = [layout.paths[r][np.array(row.targets, dtype=np.int64) - 1] for r, row in enumerate(rows)]
    targets = [row.ids_T[t] for row in rows for t in row.targets]
    return Pack(
        ids_T=torch.from_numpy(_concatenate(layout.ids)).to(device),
        positions_T=torch.from_numpy(_concatenate(layout.positions)).to(device),
        nodes=tuple(layout.nodes),
        predictors_U=torch.from_numpy(_concatenate(predictors)).to(device),
        targets_U=torch.tensor(targets, dtype=torch.int64, device=device),
        row_targets=tuple(len(row.targets) for row in rows),
    )


class _Layout:
    """Grows the line of tokens node by node, and for each row the pack index of each of its tokens."""

    def __init__(self, used: Sequence[Ints]) -> None:
        self._used = used
        self._length = 0
        self.ids: list[Ints] = []
        self.positions: list[Ints] = []
        self.nodes: list[Node] = []
        self.paths: list[Ints] = [np.empty(len(ids), dtype=np.int64) for ids in used]

    def add(self, rows: Sequence[int], common: Sequence[int]) -> None:
        """Adds rows in lexicographic order; common[i] is the length of the prefix that rows i and i+1 share."""
        branches: list[_Branch] = [(rows, common, 0, ())]
        while branches:
            rows, common, depth, ancestors = branches.pop()
            end = min(common, default=len(self._used[rows[0]]))
            if end > depth and (len(rows) == 1 or end - depth >= MIN_SHARED):
                ancestors = self._node(rows, depth, end, ancestors)
                depth = end
            if len(rows) > 1:
                runs = list(_runs(common, end))
                branches += [(rows[a:b], common[a : b - 1], depth, ancestors) for a, b in reversed(runs)]

    def _node(
        self, rows: Sequence[int], depth: int, end: int, ancestors: tuple[tuple[int, int], ...]
    ) -> tuple[tuple[int, int], ...]:
        """Appends tokens [depth, end) of the rows, which are the same in all; returns the ancestors of what follows."""
        start, stop = self._length, self._length + end - depth
        self.ids.append(self._used[rows[0]][depth:end])
        self.positions.append(np.arange(depth, end))
        self.nodes.append(Node(start, stop, ancestors))
        for row in rows:
            self.paths[row][depth:end] = np.arange(start, stop)
        self._length = stop
        if ancestors and ancestors[-1][1] == start:
            return (*ancestors[:-1], (ancestors[-1][0], stop))
        return (*ancestors, (start, stop))


def _runs(common: Sequence[int], end: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows whose neighbours share more than `end` tokens: the branches below it."""
    first = 0
    for i, length in enumerate(common, start=1):
        if length == end:
            yield first, i
            first = i
    yield first, len(common) + 1


def _common(a: Ints, b: Ints) -> int:
    """Length of the common prefix."""
    length = min(len(a), len(b))
    different = np.nonzero(a[:length] != b[:length])[0]
    return int(different[0]) if len(different) else length


def _concatenate(arrays: list[Ints]) -> Ints:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)
