"""`import gyre` gives the names that a program needs, and loads nothing before one is used."""

import asyncio
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic_journal import journal

import gyre
from gyre.control.live.run import Run as LiveRun
from gyre.core import config as configs
from gyre.core.errors import ConfigError
from gyre.core.events import ProcessLost
from gyre.store import RunDir

QUICKSTART = Path(__file__).parents[1] / "examples/quickstart.toml"


@pytest.fixture
def run(tmp_path: Path) -> gyre.Run:
    made = RunDir.create(tmp_path / "run", configs.dump(gyre.load_config(QUICKSTART)))
    with made.open_store() as store:
        for event in journal(4):
            store.append(event)
        store.append(ProcessLost(t=99.0, name="<script>alert(1)</script>", detail="\x1b[31m"))
    return gyre.Run(tmp_path / "run")


def test_every_public_name_is_there() -> None:
    for name in gyre.__all__:
        assert getattr(gyre, name).__doc__ or name == "Run"
    assert set(gyre.__all__) <= set(dir(gyre))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        gyre.nothing  # noqa: B018


def test_the_import_loads_nothing_heavy() -> None:
    program = "import gyre, sys; assert not {'torch', 'transformers', 'gyre.api'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_configuration_is_checked_without_starting() -> None:
    config = gyre.load_config(QUICKSTART, "scheduler.executions_per_group=1")
    found = {finding.check: finding for finding in gyre.check(config)}
    assert "gives no signal" in found["settings"].problem


def test_training_is_prepared_run_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The live run itself is tested elsewhere; here it is what it is given and who holds the directory."""
    monkeypatch.setattr("gyre.api.preflight", lambda *_, **__: ["a note"])
    given = []

    async def train(self: LiveRun, checkpoint: object) -> None:
        with pytest.raises(ConfigError, match="is being trained by another process"):
            RunDir.open(tmp_path / "run").claim()
        given.append((asyncio.get_running_loop().__class__.__name__, checkpoint))

    monkeypatch.setattr(LiveRun, "train", train)
    config = gyre.load_config(QUICKSTART)
    assert gyre.train(config, run_dir=tmp_path / "run").directory.root == tmp_path / "run"
    assert gyre.resume(tmp_path / "run", "scheduler.max_steps=99").config == config
    assert given == [("RunningTimeLoop", None)] * 2
    RunDir.open(tmp_path / "run").claim().close()


def test_a_report_is_one_file_with_everything_escaped(run: gyre.Run, tmp_path: Path) -> None:
    run.write_report(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    seen: list[str] = []

    class Elements(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            seen.append(tag)
            assert not any(name in ("src", "onload", "onclick") for name, _ in attributes)
            assert not any(name == "href" and (value or "").startswith("http") for name, value in attributes)

    Elements().feed(text)
    assert "script" not in seen
    assert "\x1b" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert {"svg", "table", "pre"} <= set(seen)
    assert "extra_dispatch" in text, "the configuration is part of it"


def test_trees_of_a_run_are_rebuilt_from_its_records(run: gyre.Run) -> None:
    assert gyre.load_trees(run) == {}
    assert len(run.summary().steps) == 4
    assert len(list(run.events())) > 4
