"""Cgroups of sandboxes, in a directory that plays the hierarchy."""

import os
from pathlib import Path

import pytest

from gyre.sandboxes import limits


def test_a_runner_that_starts_leaves_the_empty_cgroups_of_a_live_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CGROUP_ROOT", tmp_path)
    (tmp_path / "cgroup.controllers").touch()
    live, own, dead = (tmp_path / f"gyre-{pid}-0" for pid in (os.getppid(), os.getpid(), 2**22 + 1))
    for cgroup in (live, own, dead):
        cgroup.mkdir()
    limits.sweep_cgroups()
    assert [cgroup.exists() for cgroup in (live, own, dead)] == [True, False, False]
