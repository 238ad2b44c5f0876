import random

from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.trajectory.microstep import ExecutionRows, Row
from gyre.trajectory.packing import contributes, pack, row_cost


def execution(name, lengths, advantage=1.0):
    rows = [Row(ids_T=[1] * n, targets=[n - 1], logprobs=[-1.0], versions=[0]) for n in lengths]
    weight = 1.0 / len(rows) if rows else 0.0
    return ExecutionRows(execution_id=name, advantage=advantage, weight=weight, rows=rows)


EXECUTIONS = st.lists(
    st.tuples(st.lists(st.integers(2, 60), max_size=4), st.sampled_from([0.0, -1.0, 0.5])), max_size=12
).map(lambda items: [execution(f"e{i}", lengths, advantage) for i, (lengths, advantage) in enumerate(items)])


@settings(max_examples=150, deadline=None)
@given(EXECUTIONS, st.integers(10, 150), st.randoms(use_true_random=False))
def test_T24_any_number_of_rows_packs_and_none_is_dropped(executions, budget, rng):
    steps = pack(3, executions, budget_tokens=budget, micro_step_prefix="m")
    kept = [e for step in steps for e in step.executions]
    assert sorted(e.execution_id for e in kept) == sorted(e.execution_id for e in executions if contributes(e))
    for step in steps:
        assert step.groups == [3]
        entries = [entry for one in step.packs for entry in one]
        rows = [(i, j) for i, e in enumerate(step.executions) for j in range(len(e.rows))]
        assert sorted(entries) == rows
        for one in step.packs:
            tokens = sum(len(step.executions[i].rows[j].ids_T) for i, j in one)
            assert tokens <= budget or len(one) == 1
        assert step.tokens == sum(len(row.ids_T) for e in step.executions for row in e.rows)
        assert len(step.packs) == 1 or len(step.executions) == 1  # a scoring pass only where one execution needs it
    assert len({step.micro_step_id for step in steps}) == len(steps)
    shuffled = executions.copy()
    rng.shuffle(shuffled)
    assert pack(3, shuffled, budget_tokens=budget, micro_step_prefix="m") == steps


def test_costs_are_balanced():
    rng = random.Random(1)
    executions = [execution(f"e{i}", [rng.randrange(200, 2000) for _ in range(3)]) for i in range(64)]
    steps = pack(0, executions, budget_tokens=16384, micro_step_prefix="m")
    costs = [step.cost for step in steps]
    assert max(costs) / (sum(costs) / len(costs)) < 1.1
    assert len(steps) <= sum(step.tokens for step in steps) / 16384 * 1.15 + 1


def test_executions_without_gradient_are_left_out():
    idle = [execution("zero", [5], advantage=0.0), execution("dummy", [])]
    assert [contributes(e) for e in idle] == [False, False]
    assert pack(0, idle, budget_tokens=10, micro_step_prefix="m") == []


def test_long_rows_cost_more_than_their_tokens():
    assert row_cost(2000) > 2 * row_cost(1000)


def test_balancing_never_exceeds_the_budget():
    executions = [execution(f"e{i}", [n]) for i, n in enumerate([5, 5, 4, 3, 3])]
    steps = pack(0, executions, budget_tokens=10, micro_step_prefix="m")
    assert [step.tokens for step in steps] == [10, 10]
    assert [len(step.packs) for step in steps] == [1, 1]
