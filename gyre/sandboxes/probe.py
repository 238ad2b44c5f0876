"""Whether this machine can run sandboxes, found out by trying."""

import shutil
import subprocess

from gyre.core.programs import PROBE_TIMEOUT_S, Check, first_line
from gyre.sandboxes.bubblewrap import NAMESPACES


def check_bwrap() -> Check:
    found = first_line("bwrap", "--version")
    return Check("bubblewrap", found is not None, found or "not found", "apt-get install bubblewrap")


def check_namespaces() -> Check:
    """Every namespace that a sandbox uses, around `true`."""
    if shutil.which("bwrap") is None:
        return Check("namespaces", False, "not tried without bubblewrap", "apt-get install bubblewrap")
    command = ["bwrap", *NAMESPACES, "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    done = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    return Check(
        "namespaces",
        done.returncode == 0,
        "all of bubblewrap's" if done.returncode == 0 else done.stderr.strip(),
        "run as root, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1; in docker --privileged)",
    )


def check_socat() -> Check:
    found = shutil.which("socat")
    return Check("socat", found is not None, found or "not found", "apt-get install socat")
