"""The trajectory tree of an execution as indented lines: a chain of calls stays in its column, a branch goes right."""

from collections.abc import Sequence

import msgspec

from gyre.core.records import CallRecord


class TreeLine(msgspec.Struct, frozen=True, kw_only=True):
    """Calls that each continue the whole path of the one before, in one role class, all targets or none."""

    depth: int
    """0 for roots; a branch is one deeper than the line it leaves."""
    calls: list[CallRecord]
    leaves_at: int | None
    """For a branch, the path tokens that it shares with the call it leaves; None for roots and continuations."""
    parent_seq: int | None

    @property
    def tokens_out(self) -> int:
        return sum(len(call.output_ids) for call in self.calls)


def tree_lines(records: Sequence[CallRecord]) -> list[TreeLine]:
    """Pure. `records` are all those of one execution, by seq. A line is followed by what branches off it."""
    seq_of = {record.call_id: record.seq for record in records}
    children: dict[str | None, list[CallRecord]] = {}
    end: dict[str, int] = {}
    for record in records:
        children.setdefault(record.parent, []).append(record)
        end[record.call_id] = record.prefix_len + len(record.delta_ids) + len(record.output_ids)
    lines: list[TreeLine] = []
    waiting = [(root, 0) for root in reversed(children.get(None, []))]
    while waiting:
        head, depth = waiting.pop()
        calls, branches = [head], []
        while True:
            tip = calls[-1]
            later = children.get(tip.call_id, [])
            onward = next(
                (child for child in later if child.prefix_len == end[tip.call_id] and _alike(child, head)), None
            )
            branches += [child for child in later if child is not onward]
            if onward is None:
                break
            calls.append(onward)
        inside = head.parent is not None and head.prefix_len < end[head.parent]
        lines.append(
            TreeLine(
                depth=depth,
                calls=calls,
                leaves_at=head.prefix_len if inside else None,
                parent_seq=None if head.parent is None else seq_of[head.parent],
            )
        )
        waiting += [(branch, depth + 1) for branch in reversed(branches)]
    return lines


def _alike(one: CallRecord, other: CallRecord) -> bool:
    return one.role is other.role and one.trainable is other.trainable
