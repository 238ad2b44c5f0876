"""The command as a user of a shell has it."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gyre
from gyre.cli.main import main
from gyre.control.live.config import RunConfig
from gyre.core import config as configs
from gyre.core.events import ExecutionStarted
from gyre.store import RunDir

GYRE = [sys.executable, "-m", "gyre.cli.main"]


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"gyre {gyre.__version__}\n"


def test_a_reader_that_wants_no_more_is_no_error(tmp_path: Path) -> None:
    """The pipe is closed before the command writes: nobody has to be fast."""
    RunDir.create(tmp_path / "run", "")
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*GYRE, "inspect", str(tmp_path / "run")], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("command", ["plan", "check", "train"])
def test_usage_asks_only_for_what_is_required(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):  # argparse's way, with its code 2
        assert main([command]) == 2
    assert "section.key" not in capsys.readouterr().err.splitlines()[-1]


def test_a_profile_of_ones_own_is_found_from_the_configuration(tmp_path: Path) -> None:
    text = Path("examples/quickstart.toml").read_text().replace('"claude_code" ', '"agents/mine.toml"')
    (tmp_path / "run.toml").write_text(text)
    config = configs.load(tmp_path / "run.toml", [], RunConfig)
    assert config.harness.name == str(tmp_path / "agents/mine.toml")
    # The effective configuration of a run has it absolute, so that the run directory may be anywhere.
    (tmp_path / "effective.toml").write_text(configs.dump(config))
    assert configs.load(tmp_path / "effective.toml", [], RunConfig) == config
    assert configs.load(Path("examples/quickstart.toml"), [], RunConfig).harness.name == "claude_code"


def test_setup_takes_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["setup", "mine.toml"]) == 2
    assert f"{tmp_path}/mine.toml: there is no such profile" in capsys.readouterr().err


def test_output_that_goes_to_a_program_is_not_cut(tmp_path: Path) -> None:
    long = "a-task-with-a-name-that-is-longer-than-any-column-of-a-terminal-" * 3
    run = RunDir.create(tmp_path / "run", "")
    with run.open_store() as store:
        store.append(ExecutionStarted(t=0.0, execution_id="g0-0", group=0, query=long, harness="claude_code"))
    done = subprocess.run(
        [*GYRE, "inspect", str(run.root)], stdout=subprocess.PIPE, text=True, check=True, env=ENVIRONMENT
    )
    assert long in done.stdout


def test_findings_are_json_on_the_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "examples/quickstart.toml", "tasks.root=/nowhere", "--json", "-"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert not next(finding for finding in found if finding["check"] == "tasks")["ok"]


ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "COLUMNS"}


@pytest.mark.parametrize("command", [["plan", "--seconds", "1"], ["check"]])
def test_commands_that_train_nothing_need_no_torch(command: list[str]) -> None:
    program = (
        "import sys; sys.modules.update({'torch': None, 'megatron': None}); from gyre.cli.main import main; "
        f"sys.exit(main([{command[0]!r}, 'examples/quickstart.toml', *{command[1:]!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in (0, 2)
