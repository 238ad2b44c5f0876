"""By what each limit of a sandbox holds on this machine, and which limits the kernel does not enforce.

| limit | with a cgroup | without one |
| memory | cgroup | a watchdog over the process tree ends the sandbox; RLIMIT_DATA for each process |
| processes | cgroup | RLIMIT_NPROC, which Linux 5.14 counts for each user namespace; before, a watchdog |
| CPUs | cgroup | affinity, rounded up to whole CPUs |
| disk | a watchdog | a watchdog |
"""

import os
import platform
import re

import msgspec

from gyre.sandboxes.limits.cgroups import Cgroups

COUNTS_BY_NAMESPACE = (5, 14)


class Enforcement(msgspec.Struct, frozen=True, kw_only=True):
    """How each limit holds, in words."""

    memory: str
    processes: str
    cpus: str
    disk: str = "watchdog"

    @property
    def weak(self) -> list[str]:
        """SandboxLimits that the kernel does not enforce: a watchdog ends a sandbox that it finds beyond one."""
        return [name for name in ("memory", "processes", "cpus") if getattr(self, name) == "watchdog"]

    def describe(self) -> str:
        return ", ".join(f"{name} by {getattr(self, name)}" for name in ("memory", "processes", "cpus", "disk"))


def enforcement(cgroups: Cgroups, release: str | None = None) -> Enforcement:
    """`release` is the kernel's, of this machine by default."""
    version = re.match(r"(\d+)\.(\d+)", release or platform.release())
    counted = version is not None and (int(version[1]), int(version[2])) >= COUNTS_BY_NAMESPACE
    pinned = "affinity" if hasattr(os, "sched_setaffinity") else "watchdog"
    return Enforcement(
        memory=cgroups.kind if "memory" in cgroups.enforced else "watchdog",
        processes=cgroups.kind if "pids" in cgroups.enforced else "rlimit" if counted else "watchdog",
        cpus=cgroups.kind if "cpu" in cgroups.enforced else pinned,
    )
