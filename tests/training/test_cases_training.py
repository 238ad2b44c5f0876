"""From recorded calls to gradients against brute force in fp64, and public cases of masks, loss and packing.

A world here is a group of executions with random trees and one log-prob per sampled token; every token id is unique, so
a target of a row can be traced to the token that it is. What the brute force knows of admission is which tokens are
admitted; it knows neither rows nor packs.
"""

import math
import random

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from training_cases import hf_logprobs, micro_step

from gyre.core.drift import RATIO_EDGES
from gyre.core.records import CallRecord, RoleClass
from gyre.samples import prefixes
from gyre.samples.admission import admit
from gyre.samples.microstep import ExecutionRows, MicroStep, Row
from gyre.samples.packing import pack
from gyre.samples.rows import build_execution, dummy_execution
from gyre.training.megatron import forward_batch as layout
from gyre.training.step.loss import Evaluation, check, rows_of
from gyre.training.step.objective import ObjectiveConfig
from gyre.trajectory.tree import TrajectoryTree

BN = 8
CONFIG = ObjectiveConfig()


class World(msgspec.Struct):
    trees: dict[str, TrajectoryTree]
    advantages: dict[str, float]
    current: dict[int, float]
    """Token id → log π_θ of every sampled token."""

    def executions(self, seed: int, j_max: int | None) -> list[ExecutionRows]:
        made = [
            build_execution(
                tree, admit(tree, j_max=j_max, seed=seed), advantage=self.advantages[name], batch_executions=BN
            )
            for name, tree in self.trees.items()
        ]
        return [*made, dummy_execution("dummy", advantage=-1.0)]

    def evaluate(self, steps: list[MicroStep]) -> tuple[float, dict[int, float]]:
        """Loss and ∂loss/∂log π per token id, by the code that trains."""
        table = {token: torch.tensor(p, dtype=torch.float64, requires_grad=True) for token, p in self.current.items()}
        total = 0.0
        for step in steps:
            check(step, vocabulary=1 + max(self.current))
            evaluation = Evaluation(step, 0, CONFIG)
            packs = [
                [torch.stack([table[row.ids_T[t]] for t in row.targets]) for row in rows_of(step, one)]
                for one in step.packs
            ]
            if len(packs) > 1:
                for one, values in zip(step.packs, packs, strict=True):
                    evaluation.observe(one, values)
            for one, values in zip(step.packs, packs, strict=True):
                loss = evaluation.loss(one, values)
                loss.backward()
                total += float(loss.detach())
        return total, {token: float(p.grad) for token, p in table.items() if p.grad is not None}

    def brute_force(self, admitted: dict[str, set[int]]) -> tuple[float, dict[int, float]]:
        """docs/objective.md, in plain floats, from sets of tokens."""
        recorded = {
            token: p
            for tree in self.trees.values()
            for record in tree.records()
            for token, p in zip(record.output_ids, record.output_logprobs, strict=True)
        }
        total, gradient = 0.0, {}
        for name, tokens in admitted.items():
            advantage = self.advantages[name]
            if not tokens or advantage == 0.0:
                continue
            ratio = {u: math.exp(self.current[u] - recorded[u]) for u in tokens}
            s = math.exp(math.fsum(math.log(r) for r in ratio.values()) / len(tokens))
            m = 0.0 if (advantage > 0 and s > 1.005) or (advantage < 0 and s < 0.995) else 1.0
            for u in tokens:
                coefficient = -m * min(ratio[u], 5.0) * advantage
                value = coefficient * self.current[u]
                total += min(100.0, value) / (BN * len(tokens))
                gradient[u] = (coefficient if value <= 100.0 else 0.0) / (BN * len(tokens))
        return total, gradient


@st.composite
def worlds(draw) -> World:
    rng = random.Random(draw(st.integers(0, 10_000)))
    trees, advantages, current = {}, {}, {}
    for name in "abcd"[: draw(st.integers(1, 4))]:
        records = []
        for seq in range(draw(st.integers(1, 5))):
            parent = rng.choice([None, *range(seq)])
            cut = 0
            if parent is not None:  # anywhere in the parent's own tokens
                cut = rng.randrange(max(1, records[parent].prefix_len), len(path_of(records, parent)) + 1)
            base = 100_000 * (1 + "abcd".index(name)) + 1000 * seq
            outputs = list(range(base + 500, base + 500 + rng.randrange(0, 5)))
            logprobs = [-rng.choice([0.01, 1.0, 25.0]) * rng.random() - 1e-3 for _ in outputs]
            spread = rng.choice([0.0, 0.002, 1.0, 3.0])
            current |= {u: min(-1e-4, p + rng.gauss(0, spread)) for u, p in zip(outputs, logprobs, strict=True)}
            records.append(
                CallRecord(
                    execution_id=name,
                    call_id=f"c{seq}",
                    seq=seq,
                    parent=None if parent is None else f"c{parent}",
                    prefix_len=cut,
                    delta_ids=list(range(base, base + rng.randrange(2 if parent is None else 0, 5))),
                    output_ids=outputs,
                    output_logprobs=logprobs,
                    output_versions=[0] * len(outputs),
                    role=rng.choice([RoleClass.MAIN, RoleClass.MAIN, RoleClass.SUB_AGENT, RoleClass.AUXILIARY]),
                    trainable=rng.random() < 0.85,
                )
            )
        trees[name] = TrajectoryTree.from_records(records)
        advantages[name] = draw(st.sampled_from([-1.3, -0.4, 0.0, 0.6, 40.0]))
    return World(trees, advantages, current)


def path_of(records: list[CallRecord], index: int) -> list[int]:
    record = records[index]
    prefix = path_of(records, int(record.parent[1:]))[: record.prefix_len] if record.parent else []
    return [*prefix, *record.delta_ids, *record.output_ids]


def targets(execution: ExecutionRows) -> list[int]:
    return [row.ids_T[t] for row in execution.rows for t in row.targets]


@settings(max_examples=150)
@given(worlds(), st.integers(0, 99), st.sampled_from([None, 1, 2]), st.integers(3, 60))
def test_T22_loss_and_gradient_equal_brute_force(world, seed, j_max, budget) -> None:
    """Eq. 5–6 with clip edges, ratio cap 5, loss cap 100 and L_i = 0, through admission, rows, packing and scoring."""
    executions = world.executions(seed, j_max)
    admitted = {execution.execution_id: targets(execution) for execution in executions}
    for tokens in admitted.values():
        assert len(tokens) == len(set(tokens)), "targets are disjoint over the rows of an execution"
    steps = pack(0, executions, budget_tokens=budget, micro_step_prefix="m")
    loss, gradient = world.evaluate(steps)
    sets = {name: set(tokens) for name, tokens in admitted.items() if name != "dummy"}
    expected_loss, expected_gradient = world.brute_force(sets)
    assert loss == pytest.approx(expected_loss, rel=1e-12, abs=1e-12)
    assert gradient == pytest.approx(expected_gradient, rel=1e-12, abs=1e-15)


@settings(max_examples=80)
@given(worlds(), st.integers(0, 99), st.integers(0, 99), st.integers(3, 60), st.integers(3, 60))
def test_T22_assignment_of_targets_to_rows_does_not_matter(world, seed, other, budget, other_budget) -> None:
    """With every target admitted, the draw only decides which row owns a shared token."""
    results = [
        world.evaluate(pack(0, world.executions(s, None), budget_tokens=b, micro_step_prefix="m"))
        for s, b in ((seed, budget), (other, other_budget))
    ]
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-12, abs=1e-12)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-12, abs=1e-15)


@settings(max_examples=80)
@given(worlds(), st.integers(0, 99), st.randoms(use_true_random=False))
def test_T23_gradient_does_not_depend_on_the_number_or_order_of_rows(world, seed, rng) -> None:
    executions = world.executions(seed, None)
    whole = world.evaluate(pack(0, executions, budget_tokens=10_000, micro_step_prefix="m"))
    cut = []
    for execution in executions:
        rows = [
            Row(ids_T=row.ids_T[: t + 1], targets=[t], logprobs=[p], versions=[v])
            for row in execution.rows
            for t, p, v in zip(row.targets, row.logprobs, row.versions, strict=True)
        ]
        rng.shuffle(rows)
        cut.append(msgspec.structs.replace(execution, rows=rows))
    rng.shuffle(cut)
    pieces = world.evaluate(pack(0, cut, budget_tokens=30, micro_step_prefix="m"))
    assert pieces[0] == pytest.approx(whole[0], rel=1e-12, abs=1e-12)
    assert pieces[1] == pytest.approx(whole[1], rel=1e-12, abs=1e-15)


@settings(max_examples=80)
@given(worlds(), st.integers(0, 99), st.sampled_from([None, 1, 3]))
def test_T19_every_masked_in_token_has_the_logprob_of_its_own_sample(world, seed, j_max) -> None:
    for execution in world.executions(seed, j_max):
        recorded = {
            token: p
            for record in (world.trees[execution.execution_id].records() if execution.rows else [])
            for token, p in zip(record.output_ids, record.output_logprobs, strict=True)
        }
        for row in execution.rows:
            assert [recorded[row.ids_T[t]] for t in row.targets] == pytest.approx(row.logprobs)


@settings(max_examples=150)
@given(worlds(), st.integers(0, 99))
@example(World({}, {}, {}), 0)
def test_T26_the_packer_counts_what_the_trainer_lays_out(world, seed) -> None:
    rows = [row for execution in world.executions(seed, None) for row in execution.rows]
    stretched = [
        Row(ids_T=ids, targets=[len(ids) - 1], logprobs=[0.0], versions=[0])
        for ids in ([token for token in row.ids_T for _ in range(9)] for row in rows)
    ]
    for some in (rows, stretched):
        laid_out = layout.pack_rows(some, True, torch.device("cpu")).tokens
        assert prefixes.SharedRows(some).size(range(len(some))).tokens == laid_out
    assert layout.stretches is prefixes.stretches


def test_T24_T27_pads_are_never_inferred_from_token_values(make_trainer, hf_model) -> None:
    """Rows full of what is a pad, an end or a beginning elsewhere train like any other, in one pack with others."""
    rng = random.Random(3)
    rows = []
    for ids in ([0] * 12, [0, 5, 0, 0, 9, 0], [hf_model.config.eos_token_id or 2] * 7, [0, 0], [7, 3, 0, 1, 0]):
        with torch.no_grad():
            exact = hf_logprobs(hf_model, ids).tolist()
        everything = list(range(1, len(ids)))
        rows.append(Row(ids_T=ids, targets=everything, logprobs=exact, versions=[0] * len(everything)))
    count = sum(len(row.targets) for row in rows)
    execution = ExecutionRows(execution_id="pads", advantage=rng.choice([1.0]), weight=1 / count, rows=rows)
    trainer = make_trainer(cell=0)
    trainer.wake()
    trainer.join(0, None)
    result = trainer.micro_step(micro_step("m", [execution]))
    assert (result.targets, result.gap_count) == (count, count)
    assert result.gap_max < 1e-4
    assert {version: sum(counts) for version, counts in result.ratios.items()} == {0: count}
    assert result.ratios[0][RATIO_EDGES.index(1.005)] == count
    expected = -sum(p for row in rows for p in row.logprobs) / count
    assert result.loss == pytest.approx(expected, rel=1e-4)
