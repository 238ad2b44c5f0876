"""Resource limits: rlimits for every process, a cgroup (v1, or delegated v2) for the sandbox as a whole.

Where no cgroup can be made, memory and processes of the whole tree are not limited; `cgroups_available` says so.
"""

import contextlib
import errno
import itertools
import logging
import os
from pathlib import Path

import psutil

from gyre.sandboxes.base import SandboxLimits

log = logging.getLogger(__name__)

CGROUP_ROOT = Path("/sys/fs/cgroup")
PREFIX = "gyre-"
_counter = itertools.count()

# A shell, because joining a cgroup and setting limits must happen in the child, before bubblewrap's first fork.
LIMIT_SCRIPT = """
ulimit -c 0
ulimit -f "$1"
ulimit -n "$2"
ulimit -t "$3"
shift 3
while [ "$1" != -- ]; do echo 0 >"$1" || exit 125; shift; done
shift
exec "$@"
"""


def limited(argv: list[str], limits: SandboxLimits, cgroups: "list[Path]") -> list[str]:
    """`argv` started under `limits`, as a member of `cgroups`."""
    blocks = limits.file_mb * 2048  # of 512 bytes
    joins = [str(cgroup / "cgroup.procs") for cgroup in cgroups]
    values = [str(blocks), str(limits.open_files), str(limits.cpu_s)]
    return ["/bin/sh", "-c", LIMIT_SCRIPT, "limits", *values, *joins, "--", *argv]


def make_cgroups(limits: SandboxLimits) -> list[Path]:
    """Cgroups that enforce memory and processes; empty when this machine does not let us make any."""
    made: list[Path] = []
    name = f"{PREFIX}{os.getpid()}-{next(_counter)}"
    v2 = (CGROUP_ROOT / "cgroup.controllers").exists()
    knobs = {
        "memory": [("memory.max" if v2 else "memory.limit_in_bytes", limits.memory_mb << 20)],
        "pids": [("pids.max", limits.processes)],
    }
    try:
        for parent, controllers in _parents(v2).items():
            cgroup = parent / name
            cgroup.mkdir()
            made.append(cgroup)
            for controller in controllers:
                for knob, value in knobs[controller]:
                    (cgroup / knob).write_text(str(value))
    except OSError as error:
        remove_cgroups(made)
        log.debug("no cgroup: %s", error)
        return []
    return made


def remove_cgroups(cgroups: list[Path]) -> list[Path]:
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


def sweep_cgroups() -> None:
    """Removes the empty cgroups that a killed runner left behind. A live runner's may be empty, too: it makes one
    before a process joins it."""
    v2 = (CGROUP_ROOT / "cgroup.controllers").exists()
    for parent in _parents(v2):
        for cgroup in parent.glob(f"{PREFIX}*"):
            owner = cgroup.name.removeprefix(PREFIX).partition("-")[0]
            if owner.isdecimal() and int(owner) != os.getpid() and psutil.pid_exists(int(owner)):
                continue
            with contextlib.suppress(OSError):  # Not empty, or gone.
                cgroup.rmdir()


def cgroups_available() -> bool:
    cgroups = make_cgroups(SandboxLimits())
    remove_cgroups(cgroups)
    return bool(cgroups)


def _parents(v2: bool) -> dict[Path, list[str]]:
    """Our own cgroup of each hierarchy, with the controllers that we set there."""
    own: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        own |= dict.fromkeys(names.split(","), path)
    if v2:
        return {_rebased(CGROUP_ROOT, own.get("", "/")): ["memory", "pids"]}
    return {_rebased(CGROUP_ROOT / name, own[name]): [name] for name in ("memory", "pids") if name in own}


def _rebased(mount: Path, path: str) -> Path:
    """In a container the path may be the host's, while the mount shows our cgroup as its root."""
    inside = mount / path.lstrip("/")
    return inside if inside.is_dir() else mount
