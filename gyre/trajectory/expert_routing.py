"""One choice of experts for every token of a tree.

A record holds the experts at the position before each of its own tokens, so an output was sampled with exactly what its
record says of its own positions. A token that several calls continue was computed by each of them, maybe with other
weights or on another engine: the first recorded choice counts. It is the one that the token's own call was sampled
with, except for the last token of a call, which only a later call computes.

Shapes: `_P` positions; see `gyre.core.expert_routing`.
"""

import numpy as np
from msgspec import UNSET

from gyre.core.expert_routing import Choices, ExpertRouting, joined
from gyre.core.records import CallRecord
from gyre.trajectory.node import Node


def recorded_positions(record: CallRecord) -> int:
    """How many positions a record's routing has: one per own token, less the first token of a root."""
    return len(record.delta_ids) + len(record.output_ids) - (record.prefix_len == 0)


def path_routing(leaf: Node, length: int) -> ExpertRouting | None:
    """Experts of the first `length` positions of a node's path, absent where no record tells; None when none does.
    Reads each ancestor once."""
    parts: list[ExpertRouting | int] = []
    node: Node | None = leaf
    while node is not None:
        if length > node.start:
            parts.append(_own(node, length))
            length = node.start
        node = node.parent
    some = next((part for part in parts if isinstance(part, ExpertRouting)), None)
    if some is None:
        return None
    return joined([some.absent(part) if isinstance(part, int) else part for part in reversed(parts)])


def _own(node: Node, stop: int) -> ExpertRouting | int:
    """Of the node's own tokens before `stop`: as its own call tells, and for the rest (its last token) as the first
    call that branches off there tells. A number is that many positions of which nothing is known."""
    length = min(stop, node.end) - node.start
    own = node.record.routing
    branches = [
        (child.start - 1 - node.start, child.record.routing)
        for child in node.children
        if 0 < child.start - node.start <= length and child.record.routing is not UNSET
    ]
    if own is not UNSET:
        own = own.part(0 if node.start == 0 else 1).of_length(length)
    elif branches:
        own = branches[0][1].absent(length)
    else:
        return length
    choices = own.choices().copy()
    for position, routing in branches:
        fill_absent(choices[position : position + 1], routing.choices()[:1])
    return own.replaced(choices)


def fill_absent(into: Choices, source: Choices) -> None:
    """Takes over what is absent, in place."""
    absent = (into == np.iinfo(into.dtype).max).all((1, 2))
    into[absent] = source[absent]
