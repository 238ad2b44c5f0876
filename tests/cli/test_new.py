"""Skeletons work as they are written: their own tests pass."""

import subprocess
import sys
from pathlib import Path

import pytest

from gyre.cli.main import main

REPOSITORY = Path(__file__).parents[2]


def passes(test: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(test.parent), str(test)],
        cwd=test.parent,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{REPOSITORY}:{test.parent}:" + ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.parametrize(
    ("kind", "name", "test"),
    [
        ("task", "add-up", "add-up/test_task.py"),
        ("harness", "mine.toml", "test_mine.py"),
        ("reward", "brief.py", "test_brief.py"),
    ],
)
def test_a_skeleton_passes_its_own_test(tmp_path: Path, kind: str, name: str, test: str) -> None:
    assert main(["new", kind, str(tmp_path / "made" / name)]) == 0
    passes(tmp_path / "made" / test)


@pytest.mark.harness
def test_a_configuration_passes_every_check(tmp_path: Path) -> None:
    assert main(["new", "config", str(tmp_path / "run.toml")]) == 0
    assert main(["check", str(tmp_path / "run.toml")]) == 0
    passes(tmp_path / "test_run.py")


def test_nothing_is_overwritten_and_names_must_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "reward", str(tmp_path / "mine.py")]) == 0
    assert main(["new", "reward", str(tmp_path / "mine.py")]) == 2
    assert main(["new", "reward", str(tmp_path / "mine.toml")]) == 2
    assert main(["new", "reward", str(tmp_path / "my-own.py")]) == 2
    assert main(["new", "task", "/proc/nothing/task"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 4
    assert "exists: choose another name" in errors[0]
    assert "ends in .py" in errors[1]
    assert "cannot be the name of a reward" in errors[2]
    assert "cannot be written" in errors[3]
