"""Doing nothing scores 0 and the solution scores 1. Run it with pytest, where bubblewrap is installed."""

import json
import shutil
import subprocess
from pathlib import Path

from gyre.tasks import load_task

TASK = Path(__file__).parent


def run(script: Path, workspace: Path, logs: Path) -> None:
    """The script, as it runs in a sandbox of Gyre: the workspace at /app, no network."""
    command = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr", "--ro-bind", "/etc", "/etc"]
    for name in ("bin", "lib", "lib64"):
        command += ["--symlink", f"usr/{name}", f"/{name}"]
    command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--bind", str(workspace), "/app"]
    command += ["--bind", str(logs), "/logs", "--ro-bind", str(script.parent), "/tests", "--chdir", "/app"]
    subprocess.run([*command, "bash", f"/tests/{script.name}"], check=True, timeout=60)


def test_nothing_scores_zero_and_the_solution_scores_one(tmp_path: Path) -> None:
    task = load_task(TASK)  # refuses a task that Gyre cannot run
    workspace, logs = tmp_path / "app", tmp_path / "logs"
    shutil.copytree(task.workspace or TASK, workspace)
    logs.mkdir()

    def reward() -> float:
        run(TASK / "tests/test.sh", workspace, logs)
        return float(json.loads((logs / "verifier/reward.json").read_text())["reward"])

    assert reward() == 0.0
    run(TASK / "solution/solve.sh", workspace, logs)
    assert reward() == 1.0
