"""What the runner's tests write to disk and start."""

from pathlib import Path
from typing import Protocol

from gyre.core.records import SessionAccess
from gyre.harnesses import ContextWindow
from gyre.runner.base import Budgets, ExecutionSpec

WINDOW = ContextWindow(max_context=4096, max_output=512)


class TaskWriter(Protocol):
    def __call__(self, instruction: str, test: str = ..., name: str = ..., manifest: str = ...) -> Path: ...


def make_spec(
    execution_id: str, task: Path, harness: str = "shell", *, socket: Path | str = "", **budgets: float
) -> ExecutionSpec:
    return ExecutionSpec(
        execution_id=execution_id,
        task=str(task),
        harness=harness,
        access=SessionAccess(path="/x/secret", api_key="key-1", socket=str(socket)),
        budgets=Budgets(**{"boot_s": 20, "harness_s": 20, "evaluation_s": 20, "overall_s": 60, **budgets}),
    )
