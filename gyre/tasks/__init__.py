"""Harbor-format task directories (docs/tasks.md)."""

from gyre.tasks.load import load_task, load_tasks
from gyre.tasks.task import Task, TaskLimits

__all__ = ["Task", "TaskLimits", "load_task", "load_tasks"]
