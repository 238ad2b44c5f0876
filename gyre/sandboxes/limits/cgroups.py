"""Where this process may limit its children: cgroup v1, an own subtree of cgroup v2, or a scope of systemd's.

    v1   /sys/fs/cgroup/{memory,pids,cpu}/<own>/gyre-…            a directory for each controller
    v2   <own>/gyre-…                                             when <own>/cgroup.subtree_control has the controllers
         <own>/{gyre-main,gyre-…}                                 or can get them: in a container, or a delegated scope,
                                                                  the processes in <own> move to gyre-main first
         systemd-run --scope -p MemoryMax=… COMMAND               where systemd owns the tree

Each controller is tried on its own, by making a cgroup and setting its limits; what cannot be had is told.
"""

import contextlib
import errno
import itertools
import logging
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from gyre.sandboxes.config import SandboxLimits

log = logging.getLogger(__name__)

PREFIX = "gyre-"
MAIN = "gyre-main"
PERIOD_US = 100_000
CONTROLLERS = ("memory", "pids", "cpu")
PROBE_TIMEOUT_S = 20.0
_counter = itertools.count()


class Mounted(msgspec.Struct, frozen=True):
    """Our own cgroup of one hierarchy."""

    path: Path
    v2: bool


class Cgroups(msgspec.Struct, frozen=True, kw_only=True):
    """What of the kernel's limits can be had here, and how."""

    parents: dict[str, Mounted] = {}
    """By controller: in which directory a cgroup is made."""
    systemd: tuple[str, ...] = ()
    """The command that starts a scope; () where none is needed or possible."""

    @property
    def enforced(self) -> frozenset[str]:
        return frozenset(CONTROLLERS) if self.systemd else frozenset(self.parents)

    @property
    def kind(self) -> str:
        if self.systemd:
            return "systemd scope"
        return "cgroup v2" if any(parent.v2 for parent in self.parents.values()) else "cgroup v1"

    def make(self, limits: SandboxLimits) -> list[Path]:
        """Cgroups with these limits, one a directory that has any controller. Raises OSError."""
        name = f"{PREFIX}{os.getpid()}-{next(_counter)}"
        made: list[Path] = []
        try:
            for controller, parent in self.parents.items():
                cgroup = parent.path / name
                if cgroup not in made:
                    cgroup.mkdir()
                    made.append(cgroup)
                for knob, value in _knobs(controller, parent.v2, limits):
                    # Swap is counted only where the kernel was told to.
                    if "sw" not in knob or (cgroup / knob).exists():
                        (cgroup / knob).write_text(value)
        except OSError:
            remove(made)
            raise
        return made

    def scope(self, limits: SandboxLimits) -> list[str]:
        """The command that starts another one in a scope with these limits."""
        if not self.systemd:
            return []
        properties = {
            "MemoryMax": f"{limits.memory_mb}M",
            "MemorySwapMax": "0",
            "TasksMax": str(limits.processes),
            "CPUQuota": f"{max(1, round(limits.cpus * 100))}%",
        }
        options = [option for name, value in properties.items() for option in ("-p", f"{name}={value}")]
        return [*self.systemd, *options, "--"]


def find(proc: Path = Path("/proc/self"), systemd: bool | None = None) -> Cgroups:
    """What this machine lets us do, found out by doing it."""
    parents = _own(proc)
    wanted: dict[str, Mounted] = {}
    for controller in CONTROLLERS:
        own = parents.get(controller) or parents.get("")
        if own is not None and _works(controller, own):
            wanted[controller] = own
    if set(wanted) == set(CONTROLLERS):
        return Cgroups(parents=wanted)
    command = _systemd_run() if systemd is None or systemd else ()
    if command:
        return Cgroups(systemd=command)
    own = parents.get("")
    if own is not None and _delegate(own.path, [name for name in CONTROLLERS if name not in parents]):
        for controller in CONTROLLERS:
            if controller not in wanted and _works(controller, own):
                wanted[controller] = own
    return Cgroups(parents=wanted)


def remove(cgroups: Sequence[Path]) -> list[Path]:
    """Call when their processes have ended. Returns those that are busy: the kernel lets go of a process a moment after
    it told of its end."""
    busy = []
    for cgroup in cgroups:
        try:
            cgroup.rmdir()
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            busy.append(cgroup)
    return busy


def sweep(cgroups: Cgroups) -> None:
    """Removes the empty cgroups that a killed runner left behind. A live runner's may be empty, too: it makes one
    before a process joins it."""
    for parent in {parent.path for parent in cgroups.parents.values()}:
        for cgroup in parent.glob(f"{PREFIX}*"):
            owner = cgroup.name.removeprefix(PREFIX).partition("-")[0]
            if not owner.isdecimal() or (int(owner) != os.getpid() and psutil.pid_exists(int(owner))):
                continue
            with contextlib.suppress(OSError):  # Not empty, or gone.
                cgroup.rmdir()


def _knobs(controller: str, v2: bool, limits: SandboxLimits) -> list[tuple[str, str]]:
    memory, quota = str(limits.memory_mb << 20), str(max(1000, round(limits.cpus * PERIOD_US)))
    if controller == "memory":
        names = ("memory.max", "memory.swap.max") if v2 else ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        return [(names[0], memory), (names[1], "0" if v2 else memory)]
    if controller == "pids":
        return [("pids.max", str(limits.processes))]
    if v2:
        return [("cpu.max", f"{quota} {PERIOD_US}")]
    return [("cpu.cfs_period_us", str(PERIOD_US)), ("cpu.cfs_quota_us", quota)]


def _own(proc: Path) -> dict[str, Mounted]:
    """Our cgroup by controller, and by "" that of the v2 hierarchy."""
    paths: dict[str, str] = {}
    for line in (proc / "cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        paths |= dict.fromkeys(names.split(","), path)
    found: dict[str, Mounted] = {}
    for line in (proc / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, mount = (part.replace("\\040", " ") for part in before.split()[3:5])
        if kind == "cgroup2" and "" in paths:
            own = _below(Path(mount), root, paths[""])
            found[""] = Mounted(own.parent if own.name == MAIN else own, True)
        elif kind == "cgroup":
            for controller in set(options.split(",")) & set(CONTROLLERS) & set(paths):
                found[controller] = Mounted(_below(Path(mount), root, paths[controller]), False)
    return found


def _below(mount: Path, root: str, path: str) -> Path:
    """In a container the path may be the host's, while the mount shows our cgroup as its root."""
    inside = mount / os.path.relpath(path, root) if path.startswith(root) else mount / path.lstrip("/")
    return inside if inside.is_dir() else mount


def _works(controller: str, parent: Mounted) -> bool:
    if parent.v2 and controller not in _words(parent.path / "cgroup.subtree_control"):
        return False
    try:
        remove(Cgroups(parents={controller: parent}).make(SandboxLimits()))
    except OSError as error:
        log.debug("no cgroup for %s: %s", controller, error)
        return False
    return True


def _delegate(own: Path, wanted: Sequence[str]) -> bool:
    """Turns controllers on for children of our v2 cgroup; its processes must move to a leaf for that."""
    available = [name for name in wanted if name in _words(own / "cgroup.controllers")]
    if not available:
        return False
    order = " ".join(f"+{name}" for name in available)
    try:
        try:
            (own / "cgroup.subtree_control").write_text(order)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            (own / MAIN).mkdir(exist_ok=True)
            for pid in _words(own / "cgroup.procs"):
                with contextlib.suppress(ProcessLookupError):
                    (own / MAIN / "cgroup.procs").write_text(pid)
            (own / "cgroup.subtree_control").write_text(order)
    except OSError as error:
        log.debug("cgroup %s is not delegated: %s", own, error)
        return False
    return True


def _systemd_run() -> tuple[str, ...]:
    """The command that starts a scope whose limits hold, () when there is none."""
    if shutil.which("systemd-run") is None or not Path("/run/systemd/system").is_dir():
        return ()
    user = ("--user",) if os.geteuid() else ()
    command = ("systemd-run", *user, "--scope", "--quiet", "--collect")
    probe = 'cat "/sys/fs/cgroup$(sed -n s/^0:://p /proc/self/cgroup)/memory.max"'
    limited = Cgroups(systemd=command).scope(SandboxLimits(memory_mb=64))
    try:
        done = subprocess.run(
            [*limited, "/bin/sh", "-c", probe], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return command if done.stdout.strip() == str(64 << 20) else ()


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
