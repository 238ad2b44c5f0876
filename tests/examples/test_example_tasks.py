"""The example tasks: solvable, zero when nothing is done, partial credit in between (plain bwrap, no harness)."""

import json
import shutil
import subprocess
import time
import tomllib
from pathlib import Path

import pytest

TASKS = sorted(path.parent for path in (Path(__file__).parents[2] / "examples/tasks").glob("*/task.toml"))
FAMILIES = ("terminal", "spec-to-repo", "repo-tests")

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


def sandboxed(workspace: Path, logs: Path, script: Path) -> float:
    """Runs `script` as /tests/<name> with the workspace at /app, as the evaluator does. Returns seconds."""
    command = ["bwrap", "--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--die-with-parent"]
    command += ["--ro-bind", "/usr", "/usr", "--ro-bind", "/etc", "/etc"]
    for name in ("bin", "lib", "lib64"):
        command += ["--symlink", f"usr/{name}", f"/{name}"]
    command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--bind", str(workspace), "/app"]
    command += ["--bind", str(logs), "/logs", "--ro-bind", str(script.parent), "/tests", "--chdir", "/app"]
    started = time.monotonic()
    subprocess.run([*command, "bash", f"/tests/{script.name}"], check=True, timeout=30)
    return time.monotonic() - started


def graded(task: Path, workspace: Path, logs: Path) -> dict[str, float]:
    sandboxed(workspace, logs, task / "tests/test.sh")
    return dict(json.loads((logs / "verifier/reward.json").read_text()))


@pytest.fixture(params=TASKS, ids=lambda task: task.name)
def task(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.fixture
def workspace(task: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(task / "environment/workspace", tmp_path / "app"))


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


def test_every_family_has_two_tasks() -> None:
    for family in FAMILIES:
        assert sum(task.name.startswith(f"{family}-") for task in TASKS) >= 2


def test_layout_and_category(task: Path) -> None:
    config = tomllib.loads((task / "task.toml").read_text())
    assert task.name.startswith(config["metadata"]["category"])
    assert config["task"]["name"] == f"gyre/{task.name}"
    assert (task / "instruction.md").read_text().strip()
    assert not list((task / "environment").rglob("*test.sh")), "graders must stay out of the workspace"


def test_nothing_scores_zero_and_the_solution_scores_one(task: Path, workspace: Path, logs: Path) -> None:
    untouched = graded(task, workspace, logs)
    assert len(untouched) >= 4, "partial credit in several increments"
    assert set(untouched.values()) == {0.0}
    sandboxed(workspace, logs, task / "solution/solve.sh")
    assert set(graded(task, workspace, logs).values()) == {1.0}


def test_the_first_step_of_the_solution_gives_partial_credit(task: Path, workspace: Path, logs: Path) -> None:
    lines = (task / "solution/solve.sh").read_text().splitlines()
    (logs.parent / "part").mkdir()
    part = logs.parent / "part/solve.sh"
    part.write_text("\n".join(lines[:4]))
    sandboxed(workspace, logs, part)
    assert graded(task, workspace, logs)["reward"] == pytest.approx(1 / 3, abs=1e-3)


@pytest.mark.parametrize("name", ["spec-to-repo-shop", "repo-tests-calc"])
def test_a_module_that_fails_hangs_or_lies_earns_nothing(name: str, tmp_path: Path) -> None:
    [task] = [task for task in TASKS if task.name == name]
    workspace = Path(shutil.copytree(task / "environment/workspace", tmp_path / "app"))
    (tmp_path / "logs").mkdir()
    first, second, third = (line.split()[-1] for line in (task / "solution/solve.sh").read_text().splitlines()[3:])
    (workspace / first).write_text("raise SystemExit(0)\n")
    (workspace / second).write_text("print([5, 11, 5, 3])\nraise SystemExit(0)\n" * 2)
    (workspace / third).write_text(f"def {third[:-3]}(a, b): return 5\n")
    assert graded(task, workspace, tmp_path / "logs")["reward"] == 0.0
