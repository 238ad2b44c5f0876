"""What each replica of a cell does of a micro-step: of any one, and of those that were packed for its replicas."""

import zlib

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import micro_step

from gyre.samples.microstep import ExecutionRows, MicroStep, Row
from gyre.samples.packing import contributes, pack
from gyre.training.megatron.forward_batch import pack_rows
from gyre.training.step import loss as micro_loss
from gyre.training.step.shares import share


def execution(name: str, lengths: list[int], shared: int = 0, common: int = 0) -> ExecutionRows:
    """Rows that are trained on their last token: `common` tokens of every execution, `shared` tokens of this one, and
    what is each row's own."""
    rows = []
    for i, n in enumerate(lengths):
        begin = ([1] * common + [zlib.crc32(name.encode()) % 10**6] * shared)[: n - 1]
        own = zlib.crc32(f"{name}/{i}".encode()) % 10**6
        rows.append(Row(ids_T=begin + [own] * (n - len(begin)), targets=[n - 1], logprobs=[0.0], versions=[0]))
    return ExecutionRows(execution_id=name, advantage=1.0, weight=1.0, rows=rows)


def tokens(step: MicroStep, entries: list[micro_loss.Entry], share_prefixes: bool = True) -> int:
    """What the trainer computes in one pass."""
    return pack_rows(micro_loss.rows_of(step, entries), share_prefixes, torch.device("cpu")).tokens


SHAPES = st.lists(
    st.tuples(st.lists(st.integers(2, 90), max_size=5), st.sampled_from([0, 20, 40]), st.sampled_from([0, 0, 30])),
    max_size=10,
)


@settings(max_examples=100)
@given(SHAPES, st.integers(1, 4), st.integers(1, 6))
def test_shares_of_any_micro_step_hold_every_execution_and_its_packs_once(shapes, replicas, rows_per_pack) -> None:
    step = micro_step("m", [execution(str(i), *shape) for i, shape in enumerate(shapes)], rows_per_pack)
    shares = share(step, replicas)
    assert len(shares) == replicas
    assert shares == share(step, replicas)
    assert sorted(e.execution_id for part in shares for e in part.executions) == sorted(map(str, range(len(shapes))))
    assert sum(part.tokens for part in shares) == step.tokens
    assert sum(len(part.packs) for part in shares) == len(step.packs)
    for part in shares:
        micro_loss.check(part, vocabulary=2**31)


@settings(max_examples=150)
@given(SHAPES, st.integers(1, 4), st.integers(20, 200), st.booleans())
def test_every_replica_stays_within_the_budget(shapes, replicas, budget, share_prefixes) -> None:
    """A pass is above it only with a single row that is; a replica scores only for an execution that needs it."""
    executions = [execution(str(i), *shape) for i, shape in enumerate(shapes)]
    steps = pack(
        0,
        executions,
        budget_tokens=budget,
        micro_step_prefix="m",
        replicas=replicas,
        share_prefixes=share_prefixes,
    )
    parts = [part for step in steps for part in share(step, replicas)]
    for part in parts:
        micro_loss.check(part, vocabulary=2**31)
        assert len(part.packs) <= 1 or len(part.executions) == 1
        for entries in part.packs:
            assert tokens(part, entries, share_prefixes) <= budget or len(entries) == 1
    trained = [e.execution_id for part in parts for e in part.executions]
    assert sorted(trained) == sorted(e.execution_id for e in executions if contributes(e))
    alone = pack(0, executions, budget_tokens=budget, micro_step_prefix="m", share_prefixes=share_prefixes)
    assert len(steps) <= -(-len(alone) // replicas), "no more turns than the packs of one replica need"
    assert all(part.executions for part in parts[: replicas * (len(steps) - 1)]), "only the last step leaves one idle"


def test_replicas_are_as_full_as_one_and_end_together() -> None:
    executions = [execution(f"{i:02}", [60 + 7 * (i % 5), 80], shared=40) for i in range(32)]
    for replicas in (1, 2, 4):
        steps = pack(0, executions, budget_tokens=1000, micro_step_prefix="m", replicas=replicas)
        parts = [share(step, replicas) for step in steps]
        computed = [[sum(tokens(part, one) for one in part.packs) for part in step] for step in parts]
        assert len(steps) == 4 // replicas
        assert min(map(min, computed)) > 800
        assert all(max(step) - min(step) <= 100 for step in computed)


def test_one_pack_of_work_is_divided() -> None:
    """Replicas that would have nothing to do take half of it."""
    executions = [execution(str(i), [n]) for i, n in enumerate([90, 30, 30, 30])]
    [step] = pack(0, executions, budget_tokens=1000, micro_step_prefix="m", replicas=2)
    assert [sorted(e.execution_id for e in part.executions) for part in share(step, 2)] == [["0"], ["1", "2", "3"]]


def test_packs_go_to_replicas_by_cost() -> None:
    step = micro_step("m", [execution(str(i), [n]) for i, n in enumerate([90, 30, 30, 30])], rows_per_pack=1)
    assert [[e.execution_id for e in part.executions] for part in share(step, 2)] == [["0"], ["1", "2", "3"]]
