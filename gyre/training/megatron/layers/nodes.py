"""How a pack's tokens are laid out: nodes of trees in one line, and which of their tokens a rank computes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TreeStretch:
    """Tokens [start, end) of a pack and the token ranges of all its ancestors, root first, adjacent ranges joined."""

    start: int
    end: int
    ancestors: tuple[tuple[int, int], ...] = ()

    @property
    def seen(self) -> int:
        """Score entries of its tokens: keys that each of them attends to, summed."""
        length = self.end - self.start
        return length * sum(b - a for a, b in self.ancestors) + length * (length + 1) // 2


def cut(nodes: Sequence[TreeStretch], bounds: Sequence[int]) -> list[TreeStretch]:
    """The nodes, cut further at `bounds`: what follows a cut inside a node is a child of what precedes it."""
    return [piece for node in nodes for piece in _pieces(node, [b for b in bounds if node.start < b < node.end])]


def _pieces(node: TreeStretch, bounds: list[int]) -> Iterator[TreeStretch]:
    start = node.start
    for end in (*bounds, node.end):
        yield TreeStretch(
            start, end, _joined((*node.ancestors, (node.start, start))) if start > node.start else node.ancestors
        )
        start = end


def _joined(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for a, b in ranges:
        if joined and joined[-1][1] == a:
            a = joined.pop()[0]
        joined.append((a, b))
    return tuple(joined)
