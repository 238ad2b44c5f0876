"""Starting and watching Gyre's processes, behind the contract of `base`: `LocalLauncher` for one machine;
`cluster.RayLauncher`, which needs the package ray, for several."""

from gyre.launch.base import Launcher, Process, ProcessSpec, WorkerContext
from gyre.launch.local import LocalLauncher

__all__ = ["Launcher", "LocalLauncher", "Process", "ProcessSpec", "WorkerContext"]
