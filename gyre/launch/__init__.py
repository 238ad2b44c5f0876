"""Starting and watching Gyre's processes: `LocalLauncher` for one machine, behind the contract of `base`."""

from gyre.launch.base import Launcher, Process, ProcessSpec, WorkerContext
from gyre.launch.local import LocalLauncher

__all__ = ["Launcher", "LocalLauncher", "Process", "ProcessSpec", "WorkerContext"]
