"""Runs the Ray cases where nobody can reach the cluster. Only they have Ray's packages on the path."""

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.live

INSTALLED = Path(__file__).parents[2] / ".cache/ray"
CASES = Path(__file__).with_name("ray_cases.py")


@pytest.mark.skipif(not INSTALLED.is_dir(), reason="Ray is not set up; run scripts/ray.sh")
@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
def test_ray_keeps_the_launcher_contract(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(16))
    script = 'ip link set lo up && ip addr add 10.77.0.1/32 dev lo && ip addr add 10.77.0.2/32 dev lo && exec "$@"'
    pytest_argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(CASES)]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(INSTALLED), *filter(None, sys.path)]),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    argv = ["unshare", "-n", "sh", "-c", script, "sh", *pytest_argv]
    run = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert "skipped" not in run.stdout
