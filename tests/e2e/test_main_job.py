"""The main job with the real harness, engines and trainers, shortened: it trains, is exact, and can be interrupted."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[2]
GYRE = [sys.executable, "-m", "gyre.cli.main"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def start(*arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*GYRE, *map(str, arguments)],
        cwd=REPOSITORY,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def inspect(run: Path, out: Path) -> dict[str, Any]:
    subprocess.run([*GYRE, "inspect", str(run), "--json", str(out)], check=True, cwd=REPOSITORY, env=ENVIRONMENT)
    return json.loads(out.read_text())


def is_exact(summary: dict[str, Any]) -> bool:
    gaps = [step["logprob_gap_max"] for step in summary["steps"] if step["logprob_gap_max"] is not None]
    return (
        summary["invariants_ok"] is True
        and summary["harness_errors_from_transitions"] == 0
        and bool(gaps)
        and max(gaps) <= 1e-3
    )


def test_shortened_quickstart_is_interrupted_resumed_and_exact(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = start("train", "examples/quickstart.toml", "scheduler.max_steps=4", "--run-dir", run)
    children: list[psutil.Process] = []
    assert first.stdout is not None
    lines = []
    for line in first.stdout:
        lines.append(line)
        if " step 2/4 " in line:
            # Mid-run: executions are in flight. The whole tree must be gone when the command ends.
            children = psutil.Process(first.pid).children(recursive=True)
            first.send_signal(signal.SIGINT)
    assert first.wait(timeout=60) == 130, "".join(lines)
    assert len(children) > 5
    left = [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert not left
    before = inspect(run, tmp_path / "before.json")
    assert 2 <= len(before["steps"]) < 4

    second = start("train", "--resume", run)
    output, _ = second.communicate(timeout=600)
    assert second.returncode == 0, output
    summary = inspect(run, tmp_path / "after.json")
    assert [step["step"] for step in summary["steps"]] == [1, 2, 3, 4]
    assert is_exact(summary), summary["steps"]
    assert any(transition["to"] == "training" for transition in summary["transitions"])
    assert all(execution["outcome"] for execution in summary["executions"] if execution["reward"] is not None)
    assert (run / "reward.png").is_file()
    assert (run / "timeline.png").is_file()

    hf = tmp_path / "hf"
    subprocess.run([*GYRE, "export", str(run), "--hf", str(hf)], check=True, cwd=REPOSITORY, env=ENVIRONMENT)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(hf).num_parameters() > 100_000
    assert AutoTokenizer.from_pretrained(hf)("hello").input_ids
