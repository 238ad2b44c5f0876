"""Supervises worker processes on this machine.

Each worker is a session of its own (a terminal's Ctrl-C does not reach it), logs to `<logs>/<name>.log`, serves RPC on
a unix socket in a private directory, and ends when the supervisor does, however the supervisor ends.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import msgspec

from gyre.core.errors import GyreError
from gyre.launch.base import ProcessSpec, WorkerOrder

LOG_TAIL_LINES = 12


class LocalProcess:
    """A running worker; satisfies `launch.base.Process`."""

    def __init__(self, spec: ProcessSpec, address: str, process: asyncio.subprocess.Process) -> None:
        self.spec = spec
        self.address = address
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> str:
        code = await self._process.wait()
        return f"exit {code}" if code >= 0 else f"killed by signal {-code}"

    async def stop(self, grace_s: float) -> None:
        if self._process.returncode is None:
            # asyncio's own terminate() would reap a process that is just ending, and its exit status be lost.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)
            try:
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
            except TimeoutError:
                # The worker leads its own session: its helpers go with it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


class LocalLauncher:
    """`launch.base.Launcher` for one machine. `close()` (or `async with`) ends everything it started."""

    def __init__(self, logs: Path, secret: str | None = None) -> None:
        self._logs = logs
        self.secret = secret or secrets.token_urlsafe(32)
        # Unix socket paths are limited to ~100 bytes, so not inside the run directory.
        self.sockets = Path(tempfile.mkdtemp(prefix="gyre-"))
        self._processes: list[LocalProcess] = []

    async def __aenter__(self) -> "LocalLauncher":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.stop_all(grace_s=10.0)
        shutil.rmtree(self.sockets, ignore_errors=True)

    async def start(self, spec: ProcessSpec) -> LocalProcess:
        address = f"unix:{self.sockets}/{spec.name}.sock"
        read_fd, write_fd = os.pipe()
        order = WorkerOrder(
            name=spec.name,
            entry=spec.entry,
            config=spec.config,
            address=address,
            secret=self.secret,
            ready_fd=write_fd,
        )
        log_path = self._logs / f"{spec.name}.log"
        try:
            with log_path.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "gyre.launch.worker",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **spec.env},
                    pass_fds=(write_fd,),
                    start_new_session=True,
                )
        finally:
            os.close(write_fd)
        started = LocalProcess(spec, address, process)
        self._processes.append(started)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        try:
            async with asyncio.timeout(spec.start_timeout_s):
                await _ready(read_fd)
        except (TimeoutError, EOFError) as error:
            await started.stop(grace_s=0.0)
            why = "was not ready in time" if isinstance(error, TimeoutError) else "ended while starting"
            raise GyreError(f"process {spec.name} {why}; {log_path} ends:\n{_tail(log_path)}") from None
        except asyncio.CancelledError:
            await started.stop(grace_s=0.0)
            raise
        return started

    async def stop_all(self, grace_s: float) -> None:
        stopping, self._processes = self._processes, []
        await asyncio.gather(*(process.stop(grace_s) for process in stopping))


async def _ready(fd: int) -> None:
    """Waits for the worker's word on the pipe. Raises EOFError when the pipe closes without it."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb"))
    try:
        if await reader.read(5) != b"ready":
            raise EOFError
    finally:
        transport.close()


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
