"""Runs the Mooncake cases where nobody can reach its listeners, which are on every interface."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.live

INSTALLED = Path(__file__).parents[2] / ".cache/mooncake"
CASES = Path(__file__).with_name("mooncake_cases.py")


@pytest.mark.skipif(not INSTALLED.is_dir(), reason="Mooncake is not set up; run scripts/mooncake.sh")
@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
def test_mooncake_keeps_the_transport_contract():
    script = 'ip link set lo up && exec "$@"'
    argv = [
        "unshare",
        "-n",
        "sh",
        "-c",
        script,
        "sh",
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        str(CASES),
    ]
    path = os.pathsep.join([str(INSTALLED), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}
    run = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert "skipped" not in run.stdout
