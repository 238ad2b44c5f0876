"""A bubblewrap process and the pid namespace below it: waiting for it and ending it, whole.

The namespace's init (bubblewrap's child) is known by a pidfd, so neither waiting nor killing can hit a reused pid.
When init is gone, the kernel has ended every process of the namespace, daemons included.
"""

import asyncio
import contextlib
import os
import signal
from io import FileIO
from pathlib import Path

import msgspec
import psutil

STATUS = 65_536


class _Info(msgspec.Struct):
    child_pid: int = msgspec.field(name="child-pid")


class ProcessTree:
    """Owns the process, which leads a process group, and both pipe ends that it is given."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        info_fd: int,
        ready_fd: int,
        *,
        status: bool = False,
        ready: bytes = b"\n",
        nested: bool = False,
    ) -> None:
        """With `status`, `ready_fd` is what bubblewrap's --json-status-fd writes to, else something inside says there
        that the command starts, by a line that ends in `ready`. With `nested`, bubblewrap is the child of `process`, in
        a pid namespace of its own."""
        self._status = status
        self._nested = nested
        self._line = ready
        self._said = b""
        self._process = process
        self._info = os.fdopen(info_fd, "rb", buffering=0)
        self._ready = os.fdopen(ready_fd, "rb", buffering=0)
        self._init_pid: int | None = None
        self._init_fd: int | None = None
        self._killing: asyncio.Future[None] | None = None

    async def booted(self) -> bool:
        """True when the command is about to start, False when bubblewrap gave up before."""
        info = await _first_bytes(self._info, until=b"}")
        if info:
            self._init_pid = msgspec.json.decode(info, type=_Info).child_pid
            if self._nested:
                self._init_pid = _child(_child(self._process.pid))
            if self._init_pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    self._init_fd = os.pidfd_open(self._init_pid)
        if not self._status:
            return bool(await _first_bytes(self._ready, until=self._line))
        return bool(info)

    @property
    def started(self) -> bool:
        """Whether the command was started, when the process has ended: bubblewrap tells its exit code."""
        if self._status and not self._said:
            self._said = self._ready.read(STATUS) or b""
        return not self._status or b"exit-code" in self._said

    @property
    def init_pid(self) -> int | None:
        """Of the first process inside, as the host counts; None before `booted`."""
        return self._init_pid

    async def wait(self) -> int:
        """Exit code of the command; 128 + n also when bubblewrap itself died of signal n, out of memory."""
        code = await self._process.wait()
        return code if code >= 0 else 128 - code

    async def terminate(self, grace_s: float) -> None:
        """SIGTERM to all, then `kill`."""
        if self._init_pid is not None and self._process.returncode is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(self._init_pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
        await self.kill()

    async def kill(self) -> None:
        """Returns when no process of the tree is left. Safe to call twice, also at once, and to cancel."""
        if self._killing is None:
            self._killing = asyncio.ensure_future(self._kill())
        await asyncio.shield(self._killing)

    async def _kill(self) -> None:
        if self._init_fd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init_fd, signal.SIGKILL)
        elif self._process.returncode is None:
            # Init is not known yet, and for a moment nothing binds it to its parent, but it is of the same group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._info.close()
        self._ready.close()
        if self._init_fd is not None:
            await _gone(self._init_fd)
            os.close(self._init_fd)


async def _first_bytes(pipe: FileIO, until: bytes) -> bytes:
    """Reads from a pipe up to `until`, b"" when it ends before; closes it."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        return await reader.readuntil(until)
    except asyncio.IncompleteReadError:
        return b""
    finally:
        transport.close()


def _child(pid: int | None) -> int | None:
    """The first child of a process; None when it has none, or has ended."""
    if pid is None:
        return None
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # The process has ended, or the kernel has no such file.
        try:
            children = [child.pid for child in psutil.Process(pid).children()]
        except psutil.NoSuchProcess:
            return None
    return children[0] if children else None


async def _gone(pidfd: int) -> None:
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(pidfd, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(pidfd)
