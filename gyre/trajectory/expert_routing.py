"""One choice of experts for every token of a tree, and for every token that a group's rows share.

A record holds the experts at the position before each of its own tokens, so an output was sampled with exactly what its
record says of its own positions. A token that several calls continue was computed by each of them, maybe with other
weights or on another engine: the first recorded choice counts. It is the one that the token's own call was sampled
with, except for the last token of a call, which only a later call computes.

Shapes: `_P` positions; see `gyre.core.expert_routing`.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace

from gyre.core.expert_routing import Choices, ExpertRouting, joined
from gyre.core.records import CallRecord
from gyre.samples.microstep import Row
from gyre.samples.prefixes import common_length
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
        _fill(choices[position : position + 1], routing.choices()[:1])
    return own.replaced(choices)


def agreed(rows: Sequence[Row]) -> list[Row]:
    """The rows with one choice for every token that several of them begin with, so that a shared prefix can be computed
    once and a row has the same result in any pack. Of unequal choices the first recorded one counts, by the order of
    the rows' ids and then by their order here."""
    known = [row for row in rows if row.routing is not None]
    if not known:
        return list(rows)
    some = known[0].routing
    assert some is not None
    used = [np.array(row.ids_T[: row.targets[-1]] if row.targets else [], dtype=np.int64) for row in rows]
    routings = [
        row.routing if row.routing is not None else some.absent(len(ids)) for row, ids in zip(rows, used, strict=True)
    ]
    order = sorted(range(len(rows)), key=lambda r: rows[r].ids_T[: len(used[r])])
    common = [common_length(used[a], used[b]) for a, b in pairwise(order)]
    choices = [routings[r].choices().copy() for r in order]
    for i in reversed(range(len(common))):
        _fill(choices[i][: common[i]], choices[i + 1][: common[i]])
    for i, length in enumerate(common):
        choices[i + 1][:length] = choices[i][:length]
    found = dict(zip(order, choices, strict=True))
    return [replace(row, routing=routings[r].replaced(found[r])) for r, row in enumerate(rows)]


def _fill(into: Choices, source: Choices) -> None:
    """Takes over what is absent, in place."""
    absent = into[:, 0, 0] == np.iinfo(into.dtype).max
    into[absent] = source[absent]
