import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gyre.core.errors import InvariantViolation
from gyre.core.records import ROLE_PRIORITY, CallRecord, RoleClass
from gyre.samples.admission import admit
from gyre.samples.microstep import DISCARDED
from gyre.samples.rows import build_execution, build_row, dummy_execution, without_discarded
from gyre.trajectory.tree import TrajectoryTree


def record(seq, parent, cut, delta, output, role=RoleClass.MAIN, trainable=True):
    base = 1000 * (seq + 1)
    return CallRecord(
        execution_id="e1",
        call_id=f"c{seq}",
        seq=seq,
        parent=None if parent is None else f"c{parent}",
        prefix_len=cut,
        delta_ids=list(range(base, base + delta)),
        output_ids=list(range(base + 500, base + 500 + output)),
        output_logprobs=[-(base + i) / 1e6 for i in range(output)],
        output_versions=[seq] * output,
        role=role,
        trainable=trainable,
    )


@st.composite
def trees(draw):
    """Random trees: children cut anywhere inside the parent's own tokens, any roles, some orphans, empty outputs."""
    records, spans = [], []
    for seq in range(draw(st.integers(1, 10))):
        parent, cut = None, 0
        if records and draw(st.booleans()):
            parent = draw(st.integers(0, len(records) - 1))
            start, end = spans[parent]
            cut = end if draw(st.booleans()) else draw(st.integers(start, end))
        delta = draw(st.integers(0 if cut else 1, 3))
        output = draw(st.integers(0, 4))
        role = draw(st.sampled_from(list(RoleClass)))
        records.append(record(seq, parent, cut, delta, output, role, draw(st.booleans()) or seq % 3 == 0))
        spans.append((cut, cut + delta + output))
    return TrajectoryTree.from_records(records)


def token_sets(tree):
    """Brute force: call → the set of eligible (call, index) output tokens on its path, token by token."""
    by_id = {r.call_id: r for r in tree.records()}

    def path(call_id):
        r = by_id[call_id]
        prefix = path(r.parent)[: r.prefix_len] if r.parent else []
        return prefix + [None] * len(r.delta_ids) + [(call_id, i) for i in range(len(r.output_ids))]

    eligible = {c for c, r in by_id.items() if r.trainable and r.role in ROLE_PRIORITY}
    return {c: {t for t in path(c) if t and t[0] in eligible} for c in by_id if c in eligible}, eligible


def admitted_tokens(admitted):
    return [(s.call_id, i) for path in admitted for s in path.targets for i in range(s.start, s.stop)]


@settings(max_examples=150)
@given(trees(), st.integers(0, 2**32), st.sampled_from([None, 1, 2, 5]))
def test_admission_against_brute_force(tree, seed, j_max):
    tokens, _ = token_sets(tree)
    leaves = {leaf.call_id for leaf in tree.leaves() if leaf.eligible}
    admitted = admit(tree, j_max=j_max, seed=seed)
    assert admitted == admit(tree, j_max=j_max, seed=seed)
    masked = set()
    for path in admitted:
        left = {leaf: tokens[leaf] - masked for leaf in leaves}
        best = min(ROLE_PRIORITY.index(tree.node(leaf).record.role) for leaf in leaves if left[leaf])
        assert path.role is ROLE_PRIORITY[best] is tree.node(path.leaf_call_id).record.role
        frozen = admitted_tokens([path])
        assert set(frozen) == left[path.leaf_call_id]
        assert len(frozen) == len(set(frozen)) == path.target_count > 0
        assert all(span.start < span.stop for span in path.targets)
        masked |= tokens[path.leaf_call_id]
    everything = set().union(*tokens.values())
    if j_max is None or len(admitted) < j_max:
        assert masked == everything  # every target of the execution is admitted once


@settings(max_examples=100)
@given(trees())
def test_leaves_against_brute_force(tree):
    records = {r.call_id: r for r in tree.records()}

    def contains(outer, inner):
        r, length = records[outer], None
        while r is not None:
            if r.call_id == inner:
                end = r.prefix_len + len(r.delta_ids) + len(r.output_ids)
                return outer != inner and length == end
            length, r = r.prefix_len, records[r.parent] if r.parent else None
        return False

    _, eligible = token_sets(tree)
    expected = [
        c
        for c in records
        if not any(contains(other, c) and (other in eligible or c not in eligible) for other in records)
    ]
    assert [leaf.call_id for leaf in tree.leaves()] == expected


def test_draws_are_proportional_to_unmasked_targets():
    tree = TrajectoryTree.from_records([record(0, None, 0, 2, 30), record(1, None, 0, 2, 10)])
    counts = Counter(admit(tree, j_max=1, seed=seed)[0].leaf_call_id for seed in range(2000))
    assert counts["c0"] / 2000 == pytest.approx(0.75, abs=0.03)


def test_masking_lowers_the_counts_of_the_next_draw():
    shared = record(0, None, 0, 2, 90)
    left, right, alone = record(1, 0, 92, 1, 10), record(2, 0, 92, 1, 10), record(3, None, 0, 1, 10)
    tree = TrajectoryTree.from_records([shared, left, right, alone])
    second = Counter()
    for seed in range(3000):
        first, then = admit(tree, j_max=2, seed=seed)
        if first.leaf_call_id == "c1":
            second[then.leaf_call_id] += 1
    assert second["c2"] / second.total() == pytest.approx(0.5, abs=0.05)


def test_T19_T20_masks_are_the_generated_tokens_and_L_counts_targets_only():
    turns = [record(0, None, 0, 5, 3), record(1, 0, 8, 4, 2), record(2, 1, 14, 7, 6)]
    tree = TrajectoryTree.from_records(turns)
    [path] = admit(tree, j_max=5, seed=0)
    row = build_row(tree, path)
    assert len(row.targets) == len(row.logprobs) == len(row.versions) == path.target_count == 3 + 2 + 6
    assert [row.ids_T[t] for t in row.targets] == [i for r in turns for i in r.output_ids]
    assert row.logprobs == [p for r in turns for p in r.output_logprobs]
    assert row.versions == [0] * 3 + [1] * 2 + [2] * 6


@settings(max_examples=80)
@given(trees(), st.integers(0, 99))
def test_T23_weights_do_not_depend_on_the_number_of_rows(tree, seed):
    admitted = admit(tree, j_max=None, seed=seed)
    rows = build_execution(tree, admitted, advantage=0.5, batch_executions=8)
    length = len(admitted_tokens(admitted))
    assert sum(len(row.targets) for row in rows.rows) == length
    assert rows.weight * length * 8 == pytest.approx(1.0 if length else 0.0)
    for row, path in zip(rows.rows, admitted, strict=True):
        assert row.targets == sorted(set(row.targets))
        assert row.ids_T == tree.path_ids(path.leaf_call_id)[: len(row.ids_T)]
        assert row.targets[-1] == len(row.ids_T) - 1


def test_a_row_ends_with_its_last_target():
    tree = TrajectoryTree.from_records([record(0, None, 0, 4, 3), record(1, 0, 7, 50, 0)])
    [path] = admit(tree, j_max=5, seed=0)
    assert path.leaf_call_id == "c1"
    assert len(build_row(tree, path).ids_T) == 7


def test_targets_of_lost_weights_keep_all_but_their_version():
    tree = TrajectoryTree.from_records([record(0, None, 0, 4, 6)])
    made = build_execution(tree, admit(tree, j_max=5, seed=0), advantage=1.0, batch_executions=1)
    mixed = replace(made, rows=[replace(made.rows[0], versions=[1, 1, 2, 2, 3, 3])])
    kept = without_discarded(mixed, 2)
    assert kept.rows[0].versions == [1, 1, 2, 2, DISCARDED, DISCARDED]
    assert replace(kept, rows=mixed.rows) == mixed
    assert replace(kept.rows[0], versions=mixed.rows[0].versions) == mixed.rows[0]


def test_nothing_to_admit():
    tree = TrajectoryTree.from_records(
        [record(0, None, 0, 2, 5, RoleClass.AUXILIARY), record(1, None, 0, 2, 5, trainable=False)]
    )
    assert admit(tree, j_max=None, seed=1) == []
    assert build_execution(tree, [], advantage=1.0, batch_executions=4).weight == 0.0
    assert dummy_execution("e9", advantage=-1.0).rows == []


def test_a_target_needs_a_token_before_it():
    tree = TrajectoryTree.from_records([record(0, None, 0, 0, 3)])
    with pytest.raises(InvariantViolation, match="no usable targets"):
        build_row(tree, admit(tree, j_max=1, seed=0)[0])


def test_appendix_c_admission_order():
    """Two mains, a main-summary, six sub-agents, a sub-agent-summary; J_max = 4 (paper C.4)."""
    roles = [RoleClass.MAIN] * 2 + [RoleClass.MAIN_SUMMARY] + [RoleClass.SUB_AGENT] * 6 + [RoleClass.SUB_AGENT_SUMMARY]
    tree = TrajectoryTree.from_records(
        record(i, None, 0, 2, size, role) for i, (role, size) in enumerate(zip(roles, itertools.count(3), strict=False))
    )
    for seed in range(20):
        assert [path.role for path in admit(tree, j_max=4, seed=seed)] == [
            RoleClass.MAIN,
            RoleClass.MAIN,
            RoleClass.MAIN_SUMMARY,
            RoleClass.SUB_AGENT,
        ]
