"""One choice of experts for every token that a group's rows share.

Shapes: `_T` tokens; see `gyre.core.expert_routing`.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from msgspec.structs import replace

from gyre.samples.microstep import Row
from gyre.samples.prefixes import common_length
from gyre.trajectory.expert_routing import fill_absent


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
        fill_absent(choices[i][: common[i]], choices[i + 1][: common[i]])
    for i, length in enumerate(common):
        choices[i + 1][:length] = choices[i][:length]
    found = dict(zip(order, choices, strict=True))
    return [replace(row, routing=routings[r].replaced(found[r])) for r, row in enumerate(rows)]
