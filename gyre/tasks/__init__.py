"""Harbor-format task directories (DESIGN §8)."""

from gyre.tasks.load import load_task, load_tasks
from gyre.tasks.task import Task, TaskLimits

__all__ = ["Task", "TaskLimits", "load_task", "load_tasks"]
