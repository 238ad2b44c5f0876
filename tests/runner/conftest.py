"""Tiny tasks and a harness that is a shell script, so that the runner's logic is tested without a model."""

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_tasks import TaskWriter

SHELL_PROFILE = """
dialect = "chat"
binary = "/bin/bash"
version_command = ["/bin/echo", "1.0"]
argv = ["/bin/bash", "-c", "${instruction}"]
policy_failures = ["CONTEXT FULL"]
env = {MODEL_URL = "${base_url}", MODEL_KEY = "${api_key}"}
files = {"notes/hello" = "key ${api_key} costs 1$$"}
[install]
source = "npm"
package = "shell"
version = "1.0"
"""


@pytest.fixture
def write_task(tmp_path: Path) -> TaskWriter:
    def write(instruction: str, test: str = "echo 1 > /logs/verifier/reward.txt", name: str = "t", manifest: str = ""):
        directory = tmp_path / "tasks" / name
        for part in ("tests", "environment/workspace"):
            (directory / part).mkdir(parents=True)
        (directory / "task.toml").write_text(manifest)
        (directory / "instruction.md").write_text(instruction)
        (directory / "tests/test.sh").write_text(test)
        (directory / "environment/workspace/seed").write_text("seed")
        return directory

    return write


@pytest.fixture
def shell_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A harness root with the profile "shell": it runs the instruction as a script."""
    profiles = tmp_path / "profiles"
    profiles.mkdir()
    (profiles / "shell.toml").write_text(SHELL_PROFILE)
    monkeypatch.setattr("gyre.harnesses.profile.PROFILES", profiles)
    root = tmp_path / "harnesses"
    (root / "shell-1.0").mkdir(parents=True)
    return root


@pytest.fixture
def proxy_socket() -> Iterator[Path]:
    """A socket that accepts and never answers."""
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listener:
        Path(directory).chmod(0o755)
        path = Path(directory) / "proxy.sock"
        listener.bind(str(path))
        listener.listen()
        yield path
