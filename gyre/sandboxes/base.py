"""What Gyre needs from an isolated place to run a harness or a verifier (docs/tasks.md).

Inside, paths are those of the Harbor format: the work directory (default /app), /logs/{agent,artifacts,verifier}, a
home and /tmp, all kept on the host under `SandboxSpec.root` after the sandbox is closed. The system is read-only, the
environment is only what the spec and the command say, and the network is the proxy or nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

PROXY_URL = "http://127.0.0.1:8080"
"""Where a harness reaches the proxy from inside."""


class SandboxLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Resource limits. Memory and processes count for the whole sandbox and need a writable cgroup; the others are
    limits of every process and always hold. The disk that a sandbox fills in all is not limited: only a quota of the
    run directory's file system bounds it."""

    memory_mb: int = 4096
    processes: int = 512
    file_mb: int = 1024
    """Largest file that may be written."""
    open_files: int = 4096
    cpu_s: int = 7200
    """CPU seconds of one process."""


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """A host path that is visible, read-only, inside. The policy must never have been able to replace `source`."""

    source: Path
    target: str


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    root: Path
    """Host directory of everything that the sandbox may write; made by `start`, kept by `close(keep=True)`."""
    workdir: str = "/app"
    env: dict[str, str] = {}
    mounts: list[Mount] = []
    proxy_socket: Path | None = None
    """Unix socket that PROXY_URL leads to; None: no network at all."""
    limits: SandboxLimits = SandboxLimits()

    @property
    def workspace(self) -> Path:
        """The work directory on the host."""
        return self.root / "app"

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    @property
    def logs(self) -> Path:
        """Holds agent/, artifacts/ and verifier/."""
        return self.root / "logs"


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    exit_code: int | None
    """None when the time was up; 128 + n when the command died of signal n."""
    timed_out: bool
    boot_s: float
    """Seconds until the command could start: namespaces, mounts, proxy forwarder listening."""
    seconds: float
    """Seconds of the command itself."""


class Sandbox(Protocol):
    """One sandbox. An `exec` is a process tree of its own: whatever it leaves running dies with it."""

    spec: SandboxSpec

    async def start(self) -> None:
        """Makes the directories and limits. Raises SandboxError."""
        ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdout: Path,
        stderr: Path,
        timeout_s: float,
        boot_timeout_s: float,
        env: Mapping[str, str] | None = None,
        stdin: Path | None = None,
        on_boot: Callable[[], None] | None = None,
    ) -> ExecResult:
        """Runs one command in the work directory; output is appended to host files. `on_boot` is called when the
        command starts. When the time is up, or the caller
        is cancelled, every process of the tree has ended (SIGTERM, then SIGKILL) before this returns or raises.
        Raises SandboxError when the command could not be started within `boot_timeout_s`."""
        ...

    async def upload(self, source: Path, target: str) -> None:
        """Copies the content of a host directory into a writable directory of the sandbox. Only before the first
        `exec`: afterwards the policy may have planted links. Raises SandboxError."""
        ...

    async def download(self, source: str, target: Path) -> None:
        """Copies a file or directory of the sandbox to the host while nothing runs; links are copied as links.
        Raises SandboxError when `source` is missing or leads out of the sandbox."""
        ...

    async def close(self, *, keep: bool) -> None:
        """Ends what runs; removes the host directories unless they are kept. Safe to call twice."""
        ...
