"""A process that no cell owns (a proxy worker, the runner, its shim), started again whenever it ends or hangs.

    keep()  waits for the end of the process ── journals it ── pause ── starts a new one ── `restored` ── wakes callers
    call()  a caller whose process is lost waits for the new one and repeats the call there

So a call may reach two processes, one after the other, and every method that goes through `call` is one that may be
repeated. What the new process needs to know, it finds in the run directory, or `restored` tells it.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from gyre.control.base import Journal
from gyre.control.setbacks import Setbacks
from gyre.core.clock import Clock
from gyre.core.errors import GyreError, PeerLost
from gyre.core.events import ProcessLost, ProcessRestarted
from gyre.launch.base import Process
from gyre.rpc import Connection

T = TypeVar("T")

END_SEEN_S = 1.0
"""Between a broken connection and the news that the process has ended."""
ANSWER_S = 10.0
"""After a broken connection, for a process that has not ended."""
REPEATS = 5
"""Calls in a row that may fail on a process that lives and answers."""

Start = Callable[[], Awaitable[Process]]
Connect = Callable[[Process], Connection[Any]]


class Service:
    def __init__(
        self, name: str, start: Start, connect: Connect, journal: Journal, clock: Clock, setbacks: Setbacks
    ) -> None:
        self.name = name
        self._start = start
        self._connect = connect
        self._journal = journal
        self._clock = clock
        self._setbacks = setbacks
        self._process: Process | None = None
        self._connection: Connection[Any] | None = None
        self._old: list[Connection[Any]] = []
        self._up = asyncio.Event()
        self._down = asyncio.Event()
        self._silent = ""
        """How the process was seen to hang, when that is why it ends."""
        self._answered = 0
        self.restored: Callable[[Any], Awaitable[None]] | None = None
        """Called with the stub of a new process before anybody else calls it."""

    @property
    def address(self) -> str:
        return self._connection.address if self._connection else ""

    async def adopt(self, found: Sequence[Process]) -> None:
        """Goes on with the newest process of an earlier controller; the others are ended."""
        *old, newest = found
        await asyncio.gather(*(process.stop(grace_s=0.0) for process in old))
        self._process, self._connection = newest, self._connect(newest)
        self._up.set()

    async def open(self) -> None:
        """Starts the process. Raises GyreError when it is not ready in time."""
        self._process = await self._start()
        self._connection = self._connect(self._process)
        self._silent = ""
        if self.restored is not None:
            try:
                await self.restored(self._connection.stub)
            except PeerLost:
                # `keep` sees why.
                return
        self._down.clear()
        self._up.set()

    async def keep(self) -> None:
        """Ends only by cancellation. Raises GyreError when new processes have no prospect."""
        while True:
            detail = await self._end()
            self._up.clear()
            self._down.set()
            lost_at = self._clock.now()
            if self._connection is not None:
                self._old.append(self._connection)
            while True:
                await self._clock.sleep(self._record(detail))
                try:
                    await self.open()
                    break
                except GyreError as error:
                    detail = str(error)
            now = self._clock.now()
            self._journal.write(ProcessRestarted(t=now, name=self.name, seconds=now - lost_at))

    async def _end(self) -> str:
        """Returns when the process has ended, or at once when there never was one, with what was seen."""
        process = self._process
        if process is None:
            return f"{self.name} did not start"
        how = await process.wait()
        return f"process {process.spec.name} {self._silent or f'ended ({how})'}; see {process.log}"

    async def call(self, do: Callable[[Any], Awaitable[T]]) -> T:
        """The result of `do` on the stub of a process that lived to its end."""
        failures = 0
        while True:
            await self._up.wait()
            connection = self._connection
            assert connection is not None
            try:
                result = await do(connection.stub)
            except PeerLost:
                failures = failures + 1 if await self._lives(connection) else 0
                if failures > REPEATS:
                    raise
                continue
            self._answered += 1
            return result

    async def end_if_silent(self, seconds: float) -> None:
        """Ends the process when it does not answer within `seconds`; `keep` starts another one."""
        connection, process = self._connection, self._process
        if connection is None or process is None or not self._up.is_set():
            return
        if not await _answers(connection, seconds) and self._process is process:
            self._silent = f"did not answer within {seconds:g} s"
            await process.stop(grace_s=0.0)

    async def restart(self) -> None:
        """Ends the process, so that `keep` starts another one."""
        if self._process is not None:
            await self._process.stop(grace_s=0.0)

    async def close(self) -> None:
        for connection in [*self._old, *([self._connection] if self._connection else [])]:
            await connection.close()

    async def _lives(self, connection: Connection[Any]) -> bool:
        """After a broken call: whether its process lives and answers. One that hangs is ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SEEN_S):
                await self._down.wait()
        if self._connection is not connection or not self._up.is_set():
            return False
        await self.end_if_silent(ANSWER_S)
        return self._connection is connection and self._up.is_set()

    def _record(self, detail: str) -> float:
        now = self._clock.now()
        self._journal.write(ProcessLost(t=now, name=self.name, detail=detail))
        return self._setbacks.note(self.name, detail, now, self._answered)


async def _answers(connection: Connection[Any], seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await connection.ping()
    except (PeerLost, TimeoutError):
        return False
    return True
