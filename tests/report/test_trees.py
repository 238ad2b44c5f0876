"""Tree summaries: leaves by role class with disjoint targets."""

from gyre.core.records import CallRecord, RoleClass
from gyre.report.trees import LeafSummary, TreeSummary, tree_summary


def call(name: str, parent: str | None, prefix: int, role: RoleClass, *, trainable: bool = True) -> CallRecord:
    """Two input and three output tokens; `seq` is the number in the name."""
    seq = int(name)
    return CallRecord(
        execution_id="g0-0",
        call_id=name,
        seq=seq,
        parent=parent,
        prefix_len=prefix,
        delta_ids=[10 * seq, 10 * seq + 1],
        output_ids=[100, 101, 102],
        output_logprobs=[-0.1] * 3,
        output_versions=[0] * 3,
        role=role,
        trainable=trainable,
    )


def test_nothing_recorded() -> None:
    assert tree_summary([]) == TreeSummary()


def test_leaves_by_priority_with_disjoint_targets() -> None:
    main, sub, auxiliary = RoleClass.MAIN, RoleClass.SUB_AGENT, RoleClass.AUXILIARY
    records = [
        call("0", None, 0, auxiliary),
        call("1", None, 0, sub),
        call("2", None, 0, main),
        call("3", "2", 5, main),
        call("4", "2", 4, main),  # branches inside the output of call 2: its first two tokens are on the path
    ]
    summary = tree_summary(records)
    assert (summary.calls, summary.nodes) == (5, 5)
    assert [leaf.role for leaf in summary.leaves] == [main, main, sub, auxiliary]
    assert sum(leaf.targets for leaf in summary.leaves[:2]) == 9, "calls 2, 3 and 4, each token once"
    assert summary.leaves[2:] == [
        LeafSummary(role=sub, calls=1, targets=3),
        LeafSummary(role=auxiliary, calls=1, targets=0),
    ]


def test_an_orphan_owns_nothing() -> None:
    records = [call("0", None, 0, RoleClass.MAIN), call("1", "0", 5, RoleClass.MAIN, trainable=False)]
    assert sum(leaf.targets for leaf in tree_summary(records).leaves) == 3
