"""One forward pass: rows laid out in a line of tokens, with the places where their targets are predicted.

Shapes: `_T` tokens of the pack, `_U` targets of the pack (row after row, ascending inside a row).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gyre.training.base import Row
from gyre.training.megatron.attention import Node


@dataclass(frozen=True)
class Pack:
    ids_T: torch.Tensor
    """Token ids, int64."""
    positions_T: torch.Tensor
    """Position of each token in its row, int64."""
    nodes: tuple[Node, ...]
    predictors_U: torch.Tensor
    """Index in the pack of the token whose hidden state predicts each target, int64."""
    targets_U: torch.Tensor
    """Token id of each target, int64."""
    row_targets: tuple[int, ...]
    """Number of targets of each row, in the order given; sums to U."""

    @property
    def tokens(self) -> int:
        return self.ids_T.shape[0]


def pack_rows(rows: Sequence[Row], device: torch.device) -> Pack:
    """Lays rows one after another. Tokens that predict nothing (from a row's last target on) are left out, and so are
    rows without targets."""
    ids: list[int] = []
    positions: list[int] = []
    nodes: list[Node] = []
    predictors: list[int] = []
    for row in rows:
        if not row.targets:
            continue
        start, length = len(ids), row.targets[-1]
        ids += row.ids_T[:length]
        positions += range(length)
        nodes.append(Node(start, start + length))
        predictors += [start + t - 1 for t in row.targets]
    return Pack(
        ids_T=torch.tensor(ids, dtype=torch.int64, device=device),
        positions_T=torch.tensor(positions, dtype=torch.int64, device=device),
        nodes=tuple(nodes),
        predictors_U=torch.tensor(predictors, dtype=torch.int64, device=device),
        targets_U=torch.tensor([row.ids_T[t] for row in rows for t in row.targets], dtype=torch.int64, device=device),
        row_targets=tuple(len(row.targets) for row in rows),
    )
