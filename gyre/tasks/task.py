"""One task as a Harbor directory describes it; unknown keys of `task.toml` stay in `raw`."""

from pathlib import Path
from typing import Any

import msgspec


class TaskLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Resources that the task asks for; None where it does not say."""

    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None


class Task(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """Name of the directory: the query's id in configs and reports."""
    path: Path
    """Absolute path of the directory."""
    instruction: str
    """Text of instruction.md: the harness's prompt."""
    workdir: str = "/app"
    """Absolute path inside the sandbox; the initial workspace is copied there."""
    env: dict[str, str] = {}
    verifier_env: dict[str, str] = {}
    agent_timeout_s: float | None = None
    verifier_timeout_s: float | None = None
    limits: TaskLimits = TaskLimits()
    verifier_user: str = "root"
    """Who runs the grader, where a sandbox has users: "root", or "agent", which what the policy wrote belongs to."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest reward that the grader may give; what is outside is none."""
    raw: dict[str, Any] = {}
    """`task.toml`, whole."""

    @property
    def workspace(self) -> Path | None:
        """Initial files of the work directory; None when the task starts with an empty one."""
        directory = self.path / "environment" / "workspace"
        return directory if directory.is_dir() else None

    @property
    def tests(self) -> Path:
        """Holds test.sh; visible at /tests only while grading."""
        return self.path / "tests"

    @property
    def solution(self) -> Path | None:
        """Holds solve.sh; never visible to the policy."""
        directory = self.path / "solution"
        return directory if directory.is_dir() else None
