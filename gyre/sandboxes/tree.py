"""A bubblewrap process and the pid namespace below it: waiting for it and ending it, whole.

The namespace's init (bubblewrap's child) is known by a pidfd, so neither waiting nor killing can hit a reused pid.
When init is gone, the kernel has ended every process of the namespace, daemons included.
"""

import asyncio
import contextlib
import os
import signal
from io import FileIO

import msgspec
import psutil


class _Info(msgspec.Struct):
    child_pid: int = msgspec.field(name="child-pid")


class ProcessTree:
    """Owns the process, which leads a process group, and both pipe ends that it is given."""

    def __init__(self, process: asyncio.subprocess.Process, info_fd: int, ready_fd: int) -> None:
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
            with contextlib.suppress(ProcessLookupError):
                self._init_fd = os.pidfd_open(self._init_pid)
        return bool(await _first_bytes(self._ready, until=b"\n"))

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


async def _gone(pidfd: int) -> None:
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(pidfd, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(pidfd)
