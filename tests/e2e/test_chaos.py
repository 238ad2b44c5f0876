"""The short form of `benchmarks/chaos.py`: a few random kills of a real run cost no execution."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[2]


def test_random_kills_of_a_real_run_cost_no_execution(tmp_path: Path) -> None:
    out = tmp_path / "chaos.json"
    small = ("scheduler.groups_per_step=2", "scheduler.executions_per_group=2")
    command = [sys.executable, "benchmarks/chaos.py", "examples/quickstart.toml", *small]
    done = subprocess.run(
        [*command, "--kills", "4", "--every", "3", "--seed", "3", "--json", str(out)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_bytes())
    assert len(report["kills"]) >= 4
    assert report["executions_lost"] == report["groups_trained_twice"] == 0
    assert report["invariants_ok"]
    assert report["steps"] > 0
