"""Where Gyre's own files are, in a checkout and in a wheel."""

from pathlib import Path

import pytest

from gyre.core import places
from gyre.core.places import cache_root, carried, checkout

REPOSITORY = Path(__file__).parents[2]


def test_a_checkout_keeps_everything_beside_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GYRE_CACHE", raising=False)
    assert checkout() == REPOSITORY
    assert (carried("examples") / "quickstart.toml").is_file()
    assert cache_root() == REPOSITORY / ".cache"


def test_a_wheel_has_its_examples_inside_and_its_cache_in_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GYRE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(places, "PACKAGE", tmp_path / "site-packages/gyre")
    (tmp_path / "site-packages").mkdir()
    assert checkout() is None
    assert carried("examples") == tmp_path / "site-packages/gyre/examples"
    assert cache_root() == tmp_path / "home/.cache/gyre"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg/gyre"
    monkeypatch.setenv("GYRE_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
    # Beside the package there may be a project of somebody else.
    (tmp_path / "site-packages/pyproject.toml").write_text('[project]\nname = "other"\n')
    assert checkout() is None
