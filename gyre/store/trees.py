"""The shape of an execution's trajectory tree, for people who read a run."""

import msgspec

from gyre.core.records import ROLE_PRIORITY, CallRecord, RoleClass


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
    """Pure. Leaves by admission priority, then by seq. Records that are never targets are nodes, but own none."""
    by_id = {record.call_id: record for record in records}
    parents = {record.parent for record in records}
    order = [*ROLE_PRIORITY, RoleClass.AUXILIARY]
    ends = [record for record in records if record.call_id not in parents]
    owned: set[str] = set()
    leaves = []
    for end in sorted(ends, key=lambda record: (order.index(record.role), record.seq)):
        path = [end]
        while path[-1].parent is not None:
            path.append(by_id[path[-1].parent])
        fresh = [record for record in path if record.call_id not in owned]
        targets = 0 if end.role is RoleClass.AUXILIARY else sum(len(r.output_ids) for r in fresh if r.trainable)
        owned |= {record.call_id for record in fresh}
        leaves.append(LeafSummary(role=end.role, calls=len(path), targets=targets))
    return TreeSummary(calls=len(records), nodes=len(records), leaves=leaves)
