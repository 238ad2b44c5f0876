"""Which workspaces stay, and that the others are gone."""

import os
from collections.abc import Collection
from pathlib import Path

import pytest
from tiny_tasks import WINDOW, TaskWriter, make_spec

from gyre.core.errors import SandboxError
from gyre.core.records import Assessment, Outcome, Validity
from gyre.evaluation import EvaluationSection
from gyre.runner.config import RunnerConfig, RunnerSection
from gyre.runner.keeping import Keeper
from gyre.runner.worker import LocalRunner
from gyre.sandboxes.files import remove_tree
from gyre.store import RunStore


def outcome(name: str, validity: Validity = Validity.VALID, flags: list[str] | None = None) -> Outcome:
    assessment = Assessment(execution_id=name, artifact="a", evaluator="e", score=0.0, valid=True, flags=flags or [])
    return Outcome(execution_id=name, validity=validity, reward=0.0, cause="completed", assessment=assessment)


def directories(root: Path, *names: str) -> Path:
    for name in names:
        (root / name / "app").mkdir(parents=True)
    return root


async def left_of(policy: str, root: Path, outcomes: list[Outcome], earlier: Collection[str] = ()) -> set[str]:
    keeper = Keeper(policy, root, earlier, remove_tree)
    for each in outcomes:
        (root / each.execution_id).mkdir(exist_ok=True, parents=True)
        keeper.closed(each)
    await keeper.close()
    return {path.name for path in root.iterdir()}


async def test_all_stay(tmp_path: Path) -> None:
    assert await left_of("all", tmp_path, [outcome("a"), outcome("b")]) == {"a", "b"}


async def test_failed_are_those_without_a_valid_outcome_or_with_a_sign_of_tampering(tmp_path: Path) -> None:
    outcomes = [outcome("a"), outcome("b", Validity.UNRESOLVED), outcome("c", flags=["grader_killed"])]
    assert await left_of("failed", tmp_path, outcomes) == {"b", "c"}


async def test_the_last_n_stay_and_an_earlier_runners_count(tmp_path: Path) -> None:
    earlier = ("new", "middle", "old")
    for age, name in enumerate((*earlier, "running")):
        directories(tmp_path, name)
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    assert await left_of("last 3", tmp_path, [outcome("a")], earlier) == {"middle", "new", "a", "running"}
    assert await left_of("last 1", tmp_path, [outcome("a"), outcome("b")], (*earlier, "a")) == {"b", "running"}


async def test_a_workspace_that_cannot_be_removed_is_no_error(tmp_path: Path) -> None:
    async def stuck(_: Path) -> None:
        raise SandboxError("busy")

    keeper = Keeper("last 1", directories(tmp_path, "a"), ["a"], stuck)
    keeper.closed(outcome("b"))
    await keeper.close()


@pytest.mark.parametrize(("keep", "left"), [("all", ["e-0", "e-1"]), ("failed", ["e-1"])])
async def test_a_runner_collects_what_its_policy_does_not_keep(
    tmp_path: Path, shell_root: Path, write_task: TaskWriter, keep: str, left: list[str]
) -> None:
    (tmp_path / "run").mkdir()
    config = RunnerConfig(
        run_dir=str(tmp_path / "run"),
        window=WINDOW,
        harness_root=str(shell_root),
        section=RunnerSection(keep=keep),
        evaluation=EvaluationSection(attempts=1),
    )
    runner = LocalRunner(config, RunStore(tmp_path / "run/gyre.sqlite"))
    await runner.start(make_spec("e-0", write_task("echo x > out", name="good")))
    await runner.start(make_spec("e-1", write_task("echo x > out", "true", name="broken")))
    for name in ("e-0", "e-1"):
        await runner.wait(name)
    await runner.shutdown()
    assert sorted(path.name for path in (tmp_path / "run/workspaces").iterdir()) == left
