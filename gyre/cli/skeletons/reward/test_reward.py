"""The reward tells work from none, and stays in its range."""

from pathlib import Path

from name_of_it import score

TASK = {"name": "task", "path": "/tasks/task", "instruction": "Write a file."}


def test_nothing_scores_zero(tmp_path: Path) -> None:
    assert score(tmp_path, TASK, {"calls": 1}) == {"reward": 0.0, "files": 0.0}


def test_a_file_scores_and_a_long_way_to_it_scores_less(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    short, long = (score(tmp_path, TASK, {"calls": calls}) for calls in (3, 300))
    assert isinstance(short, dict)
    assert isinstance(long, dict)
    assert 0.0 <= long["reward"] < short["reward"] <= 1.0
