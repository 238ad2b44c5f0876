"""RunDir: what is created, what is refused, which checkpoint counts."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

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


def save(run: RunDir, version: int) -> Path:
    """A checkpoint, as training leaves it."""
    directory = run.checkpoint_path(version)
    directory.mkdir()
    for name in ("config.json", "trainer.json"):
        (directory / name).write_text("{}")
    for name in ("model.safetensors", "optimizer.safetensors"):
        save_file({"w": np.ones(3, np.float32)}, directory / name)
    return directory


def test_the_latest_complete_checkpoint_counts(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", "")
    assert run.latest_checkpoint() is None
    for version in (3, 12, 1_000_000):
        save(run, version)
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


@pytest.mark.parametrize("part", ["model.safetensors", "optimizer.safetensors", "trainer.json", "config.json", "*"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before_with_a_sentence(
    tmp_path: Path, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDir.create(tmp_path / "run", "")
    save(run, 3)
    newest = save(run, 4)
    for file in newest.glob(part):
        file.unlink() if part == "*" else os.truncate(file, file.stat().st_size // 2)
    assert run.latest_checkpoint() == (3, run.checkpoint_path(3))
    assert "v000004 is damaged" in caplog.text
    assert "going back to the checkpoint of version 3" in caplog.text
    run.prune_checkpoints(1)
    assert run.latest_checkpoint() == (3, run.checkpoint_path(3))


def test_a_run_whose_checkpoints_are_all_damaged_is_not_silently_begun_again(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", "")
    run.checkpoint_path(99).mkdir()
    with pytest.raises(ConfigError, match=r"v000099 is damaged .* no older checkpoint is whole"):
        run.latest_checkpoint()


def test_a_claim_outlives_a_config_that_an_editor_replaces_and_a_lock_that_is_removed(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", "seed = 0\n")
    with run.claim():
        subprocess.run(["sed", "-i", "s/0/1/", str(run.config)], check=True)
        with pytest.raises(ConfigError, match="is being trained by another process"):
            run.claim()
    run.lock.unlink()
    run.claim().close()


def test_a_run_that_cannot_be_written_is_refused_in_a_sentence(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", "")
    run.lock = Path("/proc/run.lock")
    with pytest.raises(ConfigError, match="cannot be written"):
        run.claim()
