"""What the sessions of one worker share."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec

from gyre.chat.render import ChatRenderer
from gyre.core.clock import Clock
from gyre.core.errors import GyreError
from gyre.core.records import CallRecord
from gyre.engines.base import Sampling
from gyre.proxy.router.router import Router
from gyre.proxy.session.intake import IntakeBounds
from gyre.proxy.session.log import LoggedCall, SessionLog
from gyre.store import RunStore


class RecordSink(Protocol):
    async def put(self, record: CallRecord, logged: LoggedCall) -> None:
        """When it returns, both survive the death of this process."""
        ...


class StoreSink:
    """Writes calls and records from one thread, so that no session waits for another's disk.

    After a failed write, no later record of that execution is written: it may continue the lost one, and a tree with a
    missing node cannot be read."""

    def __init__(self, store: RunStore, sessions: SessionLog | None = None) -> None:
        self._store = store
        self._sessions = sessions
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="records")
        self._incomplete: set[str] = set()

    async def put(self, record: CallRecord, logged: LoggedCall) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._put, record, logged)

    def close(self) -> None:
        self._thread.shutdown()
        self._store.close()

    def _put(self, record: CallRecord, logged: LoggedCall) -> None:
        if record.execution_id in self._incomplete:
            raise GyreError(f"A record of {record.execution_id} could not be written; no later one of it is stored.")
        try:
            if self._sessions is not None:
                self._sessions.add(record.execution_id, logged)
            self._store.put_record(record)
        except BaseException:
            self._incomplete.add(record.execution_id)
            raise


_BYTES_PER_TOKEN = 32


class CallBounds(msgspec.Struct, frozen=True, kw_only=True):
    max_context: int
    """Tokens of prompt plus answer."""
    max_new_tokens: int
    running: int
    """Calls of one session at a time."""

    def least_tokens(self, size: int) -> int:
        """Of a prompt that says `size` bytes: far below what any text comes to, so that one which cannot fit is not
        rendered while every other call waits."""
        return size // _BYTES_PER_TOKEN

    def new_tokens(self, prompt_tokens: int, asked: int | None) -> int:
        """How long an answer may be; below 1 when the prompt leaves no room."""
        room = self.max_context - prompt_tokens
        return min(self.max_new_tokens, room, room if asked is None else asked)


class Services(msgspec.Struct, frozen=True, kw_only=True):
    renderer: ChatRenderer
    router: Router
    sink: RecordSink
    clock: Clock
    sampling: Sampling
    bounds: CallBounds
    intake: IntakeBounds
    coalesce_s: float
    replay_routing: bool = False
    """Whether engines are asked for the experts of every token."""
