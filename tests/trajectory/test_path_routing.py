"""One choice of experts per token of a tree and of a group, against plain dictionaries."""

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.chat.conversation import Conversation
from gyre.core.errors import InvariantViolation
from gyre.core.expert_routing import Choices, ExpertRouting
from gyre.core.records import CallRecord, RoleClass
from gyre.samples.admission import admit
from gyre.samples.expert_routing import agreed
from gyre.samples.microstep import ExecutionRows, Row
from gyre.samples.packing import pack
from gyre.samples.rows import build_execution
from gyre.trajectory.call import CommitRefused, PreparedCall, Sample
from gyre.trajectory.history import Match
from gyre.trajectory.node import as_tokens, longest_prefix
from gyre.trajectory.paths import PathIds
from gyre.trajectory.tree import TrajectoryTree

EMPTY = ExpertRouting(2, 2, 200, b"")


def choices(positions: int, rng: random.Random, absent: float = 0.0) -> Choices:
    rng = random.Random(rng.getrandbits(32))  # one draw of hypothesis, not one for every expert
    made = np.array([[[rng.randrange(200) for _ in range(2)] for _ in range(2)] for _ in range(positions)], np.uint8)
    made = made.reshape(positions, 2, 2)
    made[[p for p in range(positions) if rng.random() < absent]] = 255
    return made


def prepare(tree: TrajectoryTree, prompt: list[int]) -> PreparedCall:
    parent, prefix = longest_prefix(as_tokens(prompt), tree._roots)
    return PreparedCall(
        execution_id=tree.execution_id,
        conversation=Conversation(()),
        role=RoleClass.MAIN,
        agent_id="",
        path=PathIds([]),
        new_ids=prompt,
        parent=parent.call_id if parent else None,
        prefix_len=prefix,
        drift={},
        flags=[],
        match=Match(turn=None, start=0),
        nodes_seen=len(tree),
    )


def sample(outputs: list[int], routing: ExpertRouting | None) -> Sample:
    return Sample(
        output_ids=outputs,
        logprobs=[-1.0] * len(outputs),
        versions=[0] * len(outputs),
        finish="stop",
        routing=routing,
    )


def token_of(record: CallRecord, position: int, tree: TrajectoryTree) -> tuple[str, int]:
    """The tree's token at a position of a call's path: the call that stored it, and the position."""
    while position < record.prefix_len:
        assert record.parent is not None
        record = tree.record(record.parent)
    return record.call_id, position


@settings(max_examples=200)
@given(st.randoms(use_true_random=False), st.integers(1, 8))
def test_every_token_has_the_choice_that_was_recorded_first(rng: random.Random, calls: int) -> None:
    """Calls that continue, branch anywhere, run at the same time, and tell all, some or no experts."""
    tree = TrajectoryTree("e")
    running: list[PreparedCall] = []
    first: dict[tuple[str, int], bytes] = {}
    for number in range(calls):
        while len(running) < rng.randrange(1, 3):
            paths = [tree.path_ids(node.call_id) for node in tree.nodes]
            base = rng.choice([[], *paths])
            kept = base[: rng.choice([len(base), rng.randrange(len(base) + 1)])]
            running.append(prepare(tree, kept + [rng.randrange(3) for _ in range(rng.randrange(0 if kept else 1, 4))]))
        prepared = running.pop(rng.randrange(len(running)))
        outputs = [rng.randrange(3) for _ in range(rng.randrange(1, 4))]
        ids = prepared.input_ids + outputs
        told = choices(len(ids) - 1, rng, rng.choice([0.0, 0.3]))
        told = told[prepared.routing_from : rng.choice([len(ids), rng.randrange(len(ids))])]
        routing = rng.choice([EMPTY.replaced(told), EMPTY.replaced(told), None])
        record = tree.commit(prepared, sample(outputs, routing), None, call_id=f"c{number}")
        for offset, choice in enumerate(told if routing is not None else ()):
            position = prepared.routing_from + offset
            if position >= record.prefix_len - 1 and choice[0, 0] != 255:
                first.setdefault(token_of(record, position, tree), choice.tobytes())
    again = TrajectoryTree.from_records(
        msgspec.msgpack.decode(msgspec.msgpack.encode(tree.records()), type=list[CallRecord])
    )
    assert again.digest() == tree.digest()
    for node in tree.nodes:
        ids = tree.path_ids(node.call_id)
        for length in range(1, len(ids)):
            tokens = [token_of(node.record, position, tree) for position in range(length)]
            expected = b"".join(first.get(token, b"\xff" * 4) for token in tokens)
            for one in (tree, again):
                found = one.path_routing(node.call_id, length)
                assert (b"\xff" * 4 * length if found is None else found.data) == expected


def test_rows_take_the_choices_of_their_path_and_an_output_those_of_its_own_call() -> None:
    rng = random.Random(0)
    tree = TrajectoryTree("e")
    prompts = [[1, 2, 3], [1, 2, 3, 4, 5, 6]]
    told = [choices(4, rng), choices(7, rng)]
    for number, (prompt, outputs) in enumerate(zip(prompts, ([4, 5], [7, 8]), strict=True)):
        prepared = prepare(tree, prompt)
        assert prepared.routing_from == (0, 4)[number]
        routing = EMPTY.replaced(told[number][prepared.routing_from :])
        tree.commit(prepared, sample(outputs, routing), None, call_id=f"c{number}")
    (row,) = build_execution(tree, admit(tree, j_max=None, seed=0), advantage=1.0, batch_executions=1).rows
    assert row.targets == [3, 4, 6, 7]
    # The last token of the first answer is position 4: only the second call computed it.
    assert row.routing == EMPTY.replaced(np.concatenate([told[0], told[1][4:]]))


def test_a_record_without_choices_is_stored_as_before_and_one_with_too_many_is_refused() -> None:
    tree = TrajectoryTree("e")
    record = tree.commit(prepare(tree, [1, 2]), sample([3], None), None, call_id="c0")
    assert b"routing" not in msgspec.msgpack.encode(record)
    assert tree.path_routing("c0", 2) is None
    (row,) = build_execution(tree, admit(tree, j_max=1, seed=0), advantage=1.0, batch_executions=1).rows
    assert row.routing is None
    before = tree.digest()
    with pytest.raises(CommitRefused, match="experts for 3 positions"):
        tree.commit(prepare(tree, [1, 2, 3]), sample([4], EMPTY.absent(3)), None, call_id="c1")
    assert tree.digest() == before
    wrong = msgspec.structs.replace(record, routing=EMPTY.absent(3))
    with pytest.raises(InvariantViolation, match="experts for 3 positions, not 2"):
        TrajectoryTree.from_records([wrong])


def rows_of(rng: random.Random) -> list[Row]:
    made = []
    for _ in range(rng.randrange(1, 6)):
        ids = [rng.randrange(2) for _ in range(rng.randrange(2, 9))]
        routing = rng.choice([None, EMPTY.replaced(choices(len(ids) - 1, rng, 0.3))])
        made.append(Row(ids_T=ids, targets=[len(ids) - 1], logprobs=[-1.0], versions=[0], routing=routing))
    return made


@settings(max_examples=200)
@given(st.randoms(use_true_random=False))
def test_rows_that_begin_alike_agree_on_every_common_token(rng: random.Random) -> None:
    rows = rows_of(rng)
    found = agreed(rows)
    assert [msgspec.structs.replace(row, routing=None) for row in found] == [
        msgspec.structs.replace(row, routing=None) for row in rows
    ]
    if all(row.routing is None for row in rows):
        assert found == rows
        return
    first: dict[tuple[str, int], bytes] = {}
    for r in sorted(range(len(rows)), key=lambda r: rows[r].ids_T[:-1]):
        row = rows[r]
        for p, choice in enumerate(row.routing.choices() if row.routing is not None else ()):
            if choice[0, 0] != 255:
                first.setdefault(tuple(row.ids_T[: p + 1]), choice.tobytes())
    for row in found:
        assert row.routing is not None
        assert row.routing.data == b"".join(
            first.get(tuple(row.ids_T[: p + 1]), b"\xff" * 4) for p in range(len(row.ids_T) - 1)
        )
    assert agreed(found) == found


@pytest.mark.parametrize("share", [True, False])
def test_the_packer_lets_rows_agree_where_prefixes_are_shared(share: bool) -> None:
    rng = random.Random(1)
    rows = [
        Row(
            ids_T=[1] * 30 + [n],
            targets=[30],
            logprobs=[-1.0],
            versions=[0],
            routing=EMPTY.replaced(choices(30, rng)),
        )
        for n in range(2)
    ]
    executions = [
        ExecutionRows(execution_id=name, advantage=1.0, weight=0.5, rows=[row])
        for name, row in zip("ab", rows, strict=True)
    ]
    (step,) = pack(0, executions, budget_tokens=100, micro_step_prefix="m", share_prefixes=share)
    packed = [execution.rows[0].routing for execution in step.executions]
    assert packed == ([rows[0].routing] * 2 if share else [row.routing for row in rows])
