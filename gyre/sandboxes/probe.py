"""Whether this machine can run sandboxes, and by what their limits hold, found out by trying."""

import asyncio
import re
import tempfile
import threading
from pathlib import Path

from gyre.core.errors import GyreError
from gyre.core.system.programs import PROBE_TIMEOUT_S, Check, first_line
from gyre.sandboxes.base import SandboxProvider, SandboxSpec
from gyre.sandboxes.config import SandboxSection
from gyre.sandboxes.isolation import seccomp
from gyre.sandboxes.isolation.host import Host
from gyre.sandboxes.provider import open_provider

OLDEST = (0, 8)
"""The first bubblewrap that can forbid user namespaces."""


def check_bwrap() -> Check:
    found = first_line("bwrap", "--version")
    version = re.search(r"(\d+)\.(\d+)", found or "")
    if found is None or version is None:
        return Check("bubblewrap", False, found or "not found", "apt-get install bubblewrap")
    new = (int(version[1]), int(version[2])) >= OLDEST
    advice = "it cannot forbid what runs inside to make user namespaces; install bubblewrap 0.8 or newer"
    return Check("bubblewrap", new, found, advice)


def check_seccomp() -> Check:
    try:
        size = len(seccomp.program()) // 8
    except (ImportError, OSError, RuntimeError) as error:
        return Check("seccomp", False, str(error), "apt-get install libseccomp2")
    return Check("seccomp", True, f"a filter of {size} instructions")


def check_namespaces(section: SandboxSection | None = None) -> Check:
    """Starts a sandbox as a run does, with all that it is given, around `true`."""
    advice = "run as root, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1; in docker --privileged)"
    try:
        problem = _in_thread(open_provider(section or SandboxSection()))
    except GyreError as error:
        problem = str(error)
    return Check("namespaces", not problem, problem or "a sandbox starts", advice)


def check_limits(section: SandboxSection | None = None) -> Check:
    """By what each limit holds. Not ok when the kernel does not enforce one."""
    try:
        enforcement = Host(section or SandboxSection()).enforcement
    except GyreError as error:
        return Check("sandbox limits", False, str(error), "")
    found = enforcement.describe()
    if not enforcement.weak:
        return Check("sandbox limits", True, found)
    return Check(
        "sandbox limits",
        False,
        f"{found}: a watchdog looks once a second, so {' and '.join(enforcement.weak)} may go beyond for that long",
        "start Gyre as root, or in a delegated cgroup: systemd-run --user --scope -p Delegate=yes gyre …",
    )


def check_socat() -> Check:
    found = first_line("sh", "-c", "command -v socat")
    return Check("socat", found is not None, found or "not found", "apt-get install socat")


def _in_thread(provider: SandboxProvider) -> str:
    """What is wrong with a sandbox, "" when it runs; also when the caller has an event loop."""
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(_try(provider))))
    thread.start()
    thread.join()
    return found[0] if found else "the probe failed"


async def _try(provider: SandboxProvider) -> str:
    with tempfile.TemporaryDirectory(prefix="gyre-probe-") as directory:
        sandbox = provider.create(SandboxSpec(name="probe", root=Path(directory) / "root"))
        log = Path(directory) / "log"
        try:
            await sandbox.start()
            result = await sandbox.exec(
                ["true"], stdout=log, stderr=log, timeout_s=PROBE_TIMEOUT_S, boot_timeout_s=PROBE_TIMEOUT_S
            )
            return "" if result.exit_code == 0 else f"true ended with {result.exit_code}"
        except GyreError as error:
            return str(error)
        finally:
            await sandbox.close(keep=False)
            await provider.close()
