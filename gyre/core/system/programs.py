"""What a probe of this machine found, how programs are asked, and what a process may have."""

import resource
import subprocess
from typing import NamedTuple

PROBE_TIMEOUT_S = 20.0


class Check(NamedTuple):
    name: str
    ok: bool
    found: str
    """What is there."""
    advice: str = ""
    """What to do when it is not ok."""


def first_line(*command: str) -> str | None:
    """First line of the command's output; None when there is no such command or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.partition("\n")[0].strip()


def raise_open_files() -> None:
    """This process may have as many open files as the hard limit allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
