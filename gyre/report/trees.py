"""The shape of an execution's trajectory tree, for people who read a run."""

import msgspec

from gyre.core.records import CallRecord, RoleClass
from gyre.samples.admission import admit
from gyre.trajectory.tree import TrajectoryTree


class LeafSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A leaf with its root path: a candidate trajectory."""

    role: RoleClass
    calls: int
    """Nodes on the root path."""
    targets: int
    """Policy tokens of the root path that this leaf would own if every leaf were admitted: disjoint over the leaves."""


class TreeSummary(msgspec.Struct, frozen=True, kw_only=True):
    calls: int = 0
    nodes: int = 0
    leaves: list[LeafSummary] = []


def tree_summary(records: list[CallRecord]) -> TreeSummary:
    """Pure. Leaves in the order in which all would be admitted, then those that own no target, by commit order."""
    if not records:
        return TreeSummary()
    tree = TrajectoryTree.from_records(records)
    targets = {path.leaf_call_id: path.target_count for path in admit(tree, j_max=None, seed=0)}
    rank = {call_id: position for position, call_id in enumerate(targets)}
    leaves = sorted(tree.leaves(), key=lambda leaf: rank.get(leaf.call_id, len(rank)))
    return TreeSummary(
        calls=len(records),
        nodes=len(tree),
        leaves=[
            LeafSummary(
                role=leaf.record.role,
                calls=len(tree.path_steps(leaf.call_id)),
                targets=targets.get(leaf.call_id, 0),
            )
            for leaf in leaves
        ],
    )
