"""A reward in Python. Use it with this in the run's configuration, and this directory on PYTHONPATH:

[[evaluation.evaluators]]
kind = "hook"
function = "name_of_it:score"
"""

from pathlib import Path
from typing import Any


def score(workspace: Path, task: dict[str, Any], trajectory: dict[str, int]) -> float | dict[str, float] | None:
    """From 0 to 1; or named numbers with "reward" among them; or None when it cannot be told.

    `workspace` is a copy of what the execution left. The policy wrote it: read it as data and run nothing of it here.
    `task` has name, path and instruction; `trajectory` has the numbers of calls, orphans and sampled tokens."""
    written = [file for file in workspace.rglob("*") if file.is_file()]
    brief = 1.0 if trajectory.get("calls", 0) <= 20 else 0.5
    return {"reward": brief if written else 0.0, "files": float(len(written))}
