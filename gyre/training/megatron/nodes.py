"""How a pack's tokens are laid out: nodes of trees in one line."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TreeStretch:
    """Tokens [start, end) of a pack and the token ranges of all its ancestors, root first, adjacent ranges joined."""

    start: int
    end: int
    ancestors: tuple[tuple[int, int], ...] = ()
