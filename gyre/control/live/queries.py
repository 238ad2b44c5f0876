"""`Queries` over a task directory: every task once per shuffled epoch; and what is known of a task before it runs."""

import math
import random
from collections.abc import Sequence
from pathlib import Path

from gyre.tasks import Task


class ShuffledQueries:
    """Pure in (seed, group): a resumed run asks for the same tasks."""

    def __init__(self, names: Sequence[str], seed: int) -> None:
        self._names = sorted(names)
        self._seed = seed

    def query(self, group: int) -> str:
        epoch, index = divmod(group, len(self._names))
        order = list(self._names)
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order[index]


class TaskFeatures:
    """What tells long tasks from short ones before any has run: logarithms of the length of the instruction, of the
    bytes of the initial workspace and of the verifier, and of the task's own time limit."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._of = {task.name: _features(task) for task in tasks}

    def __call__(self, query: str) -> Sequence[float]:
        return self._of[query]


def _features(task: Task) -> list[float]:
    sizes = (len(task.instruction), _bytes(task.workspace), _bytes(task.tests), task.agent_timeout_s or 0.0)
    return [math.log1p(size) for size in sizes]


def _bytes(directory: Path | None) -> int:
    if directory is None:
        return 0
    return sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file())
