"""What `gyre train` refuses before anything starts."""

import json
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gyre.cli.main import main
from gyre.control.live.config import RunConfig
from gyre.core import config as configs
from gyre.store import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    config = configs.load(Path("examples/quickstart.toml"), ["scheduler.max_steps=4"], RunConfig)
    run = RunDir.create(tmp_path / "run", configs.dump(config))
    checkpoint = run.checkpoint_path(4)
    shutil.copytree("examples/policy/tiny", checkpoint)
    shutil.copy(checkpoint / "model.safetensors", checkpoint / "optimizer.safetensors")
    (checkpoint / "trainer.json").write_text('{"version": 4, "steps": 4}')
    return run


def refused(run: RunDir, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["train", *arguments, "--resume", str(run.root)]) == 2
    return capsys.readouterr().err


def test_a_complete_run_is_not_started_again(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is complete: its checkpoint is of step 4 and scheduler.max_steps = 4" in refused(run, capsys)
    # It goes on to the next check with more steps to do.
    longer = refused(run, capsys, "scheduler.max_steps=5", "rollout.max_new_tokens=5000")
    assert "rollout.max_new_tokens = 5000 leaves no room" in longer


def test_a_run_is_trained_by_one_process(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    with run.claim():
        assert "is being trained by another process" in refused(run, capsys)
    assert "is complete" in refused(run, capsys)


def test_a_config_beside_a_run_to_resume_is_refused(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert "write it as section.key=value" in refused(run, capsys, "examples/quickstart.toml")


def test_check_runs_every_check_and_starts_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    wrong = ["policy.family=nonsense", "tasks.root=/nowhere", "harness.root=/nowhere"]
    assert main(["check", "examples/quickstart.toml", *wrong, "--json", str(out)]) == 2
    found = {finding["check"]: finding for finding in json.loads(out.read_bytes())}
    assert {name for name, finding in found.items() if not finding["ok"]} >= {"settings", "tasks", "harness"}
    assert found["model"]["ok"]
    assert '"nonsense" is no model family' in capsys.readouterr().out


def test_a_second_interrupt_ends_at_once_without_a_traceback(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", "")
    program = textwrap.dedent(f"""
        import asyncio
        from pathlib import Path
        from gyre.cli import controller
        from gyre.store import RunDir

        class Hanging:
            def __init__(self, *_): ...
            async def train(self, _):
                print("started", flush=True)
                while True:
                    try:
                        await asyncio.Event().wait()
                    except asyncio.CancelledError:
                        pass

        controller.Run = Hanging
        asyncio.run(controller.control(None, RunDir.open(Path({str(run.root)!r})), None))
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline().startswith("Ending: ")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert f"Continue with: gyre train --resume {run.root}" in out
