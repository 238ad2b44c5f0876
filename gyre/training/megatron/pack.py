"""One forward pass: rows laid out in a line of tokens, with the places where their targets are predicted.

With shared prefixes the rows become trees: a prefix that several rows begin with is laid out, and computed, once. Equal
ids at equal positions after equal ids have equal hidden states, so loss and gradients are those of separate rows
(packed-tree training, DESIGN §6).

Shapes: `_T` tokens of the pack, `_U` targets of the pack (row after row, ascending inside a row).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from gyre.training.megatron.nodes import Node
from gyre.trajectory.microstep import Row
from gyre.trajectory.prefixes import common_length, stretches

Ints = npt.NDArray[np.int64]


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
    if share_prefixes:
        alive.sort(key=lambda r: rows[r].ids_T[: rows[r].targets[-1]])
    common = [common_length(used[a], used[b]) if share_prefixes else 0 for a, b in pairwise(alive)]
    for first, last, start, end in stretches([len(used[r]) for r in alive], common):
        layout.add(alive[first:last], start, end)
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
        self._above: list[tuple[tuple[int, int], ...]] = [()] * len(used)
        """For each row the pack ranges of what is laid out of it, adjacent ones joined."""

    def add(self, rows: Sequence[int], start: int, end: int) -> None:
        """Appends tokens [start, end) of the rows, which are the same in all, as one node."""
        first, last = self._length, self._length + end - start
        above = self._above[rows[0]]
        self.ids.append(self._used[rows[0]][start:end])
        self.positions.append(np.arange(start, end))
        self.nodes.append(Node(first, last, above))
        joins = bool(above) and above[-1][1] == first
        above = (*above[:-1], (above[-1][0], last)) if joins else (*above, (first, last))
        for row in rows:
            self.paths[row][start:end] = np.arange(first, last)
            self._above[row] = above
        self._length = last


def _concatenate(arrays: list[Ints]) -> Ints:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)
