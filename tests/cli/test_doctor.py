"""`gyre doctor`: a machine without anything is described, not crashed on."""

import os
from pathlib import Path

import pytest

from gyre.cli.commands import doctor as module
from gyre.cli.commands.doctor import (
    Check,
    check_bwrap,
    check_distribution,
    check_namespaces,
    check_node,
    check_python,
    check_socat,
    doctor,
)


def test_a_bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for check in (check_node, check_bwrap, check_namespaces, check_socat):
        found = check()
        assert not found.ok
        assert found.advice
    assert check_python().ok


@pytest.mark.parametrize(("says", "ok"), [("v20.1.0", True), ("v18.19.0", False), ("nonsense", False)])
def test_node_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: str, ok: bool) -> None:
    node = tmp_path / "node"
    node.write_text(f"#!/bin/sh\necho {says}\n")
    node.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (check_node().ok, check_node().found) == (ok, says)


def test_a_sandbox_that_is_refused_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = check_namespaces()
    assert not found.ok
    assert "No permissions to create new namespace" in found.found


def test_exit_code_and_advice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = Check("one", True, "1.0", "unused"), Check("two", False, "gone", "install [two]")
    monkeypatch.setattr(module, "CHECKS", (lambda: good,))
    assert doctor() == 0
    monkeypatch.setattr(module, "CHECKS", (lambda: good, lambda: bad))
    assert doctor() == 1
    out = capsys.readouterr().out
    assert "install [two]" in out
    assert "unused" not in out
    assert "1 of 2 checks failed" in out


def test_another_project_of_the_same_name_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_distribution().ok or "gyre 0.1" in check_distribution().found
    metadata = tmp_path / "gyre-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: Gyre\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = check_distribution()
    assert not found.ok
    assert "pip uninstall gyre" in found.advice
