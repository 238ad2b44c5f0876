"""RunDir: what is created, what is refused, which checkpoint counts."""

from pathlib import Path

import pytest

from gyre.core.errors import ConfigError
from gyre.core.events import RunStarted
from gyre.store import RunDir


def test_create_then_open(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "first"
    made = RunDir.create(root, "[run]\nseed = 1\n")
    assert sorted(entry.name for entry in root.iterdir()) == [
        "checkpoints",
        "config.toml",
        "gyre.sqlite",
        "logs",
        "workspaces",
    ]
    with made.open_store() as store:
        store.append(RunStarted(t=0.0, run_id="first"))
    run = RunDir.open(root)
    assert run.config.read_text() == "[run]\nseed = 1\n"
    assert len(list(run.open_store(read_only=True).events())) == 1


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    RunDir.create(tmp_path / "run", "")
    with pytest.raises(ConfigError, match="--resume"):
        RunDir.create(tmp_path / "run", "")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        RunDir.create(tmp_path / "other", "")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        RunDir.create(tmp_path / "file" / "run", "")


def test_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes are started in another working directory and bind the workspaces."""
    monkeypatch.chdir(tmp_path)
    for run in (RunDir.create(Path("run"), ""), RunDir.open(Path("run"))):
        assert run.workspaces == tmp_path / "run" / "workspaces"


def test_an_empty_directory_may_become_a_run(tmp_path: Path) -> None:
    assert RunDir.create(tmp_path, "").database.is_file()


def test_open_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        RunDir.open(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"has no config\.toml"):
        RunDir.open(tmp_path)
    (tmp_path / "config.toml").touch()
    with pytest.raises(ConfigError, match=r"has no gyre\.sqlite"):
        RunDir.open(tmp_path)


def test_the_latest_complete_checkpoint_counts(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", "")
    assert run.latest_checkpoint() is None
    for version in (3, 12, 1_000_000):
        run.checkpoint_path(version).mkdir()
        latest = run.latest_checkpoint()
        assert latest is not None
        assert latest == (version, run.checkpoint_path(version))
    (run.checkpoints / "v2000000.partial").mkdir()
    (run.checkpoints / "v2000001").write_text("a file")
    latest = run.latest_checkpoint()
    assert latest is not None
    assert latest.version == 1_000_000


def test_a_run_named_by_a_relative_path_has_absolute_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RunDir.create(Path("run"), "")
    run = RunDir.open(Path("run"))
    assert (run.root, run.workspaces) == (tmp_path / "run", tmp_path / "run/workspaces")
