"""A model call as its readers see it: a growing list of events that any number of HTTP answers follow from the start.

A retry of a running call attaches as one more reader; a retry of a finished one reads the same events again. When the
last reader leaves before the end, the call is abandoned. When it leaves behind the end without the whole answer, the
answer is lost, until a retry reads it (`gyre.proxy.session.repeats`).
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from gyre.core.records import RoleClass
from gyre.proxy.dialects.base import Delta, TurnEnd, TurnHead
from gyre.proxy.errors import CallError

CallEvent = Delta | TurnEnd


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asked for, as far as it must be recognised again."""

    key: bytes
    """Equal for requests that one agent would have answered alike: conversation and wishes."""
    question: bytes
    """Equal for requests of one agent with the same conversation, whatever else they wish."""
    role: RoleClass


class ModelCall:
    def __init__(self, head: TurnHead, asked: Asked) -> None:
        self.head = head
        self.asked = asked
        self.task: asyncio.Task[None] | None = None
        self.settling = False
        """Being recorded, as an answer or as an orphan: nothing may interrupt that."""
        self.on_abandoned: Callable[[], None] = lambda: None
        self.delivered = False
        """A reader got the whole answer."""
        self._redelivered = False
        self._events: list[CallEvent] = []
        self._error: CallError | None = None
        self._readers = 0
        self._news = asyncio.Event()

    @property
    def finished(self) -> bool:
        """Recorded; its events are complete."""
        return bool(self._events) and isinstance(self._events[-1], TurnEnd)

    @property
    def done(self) -> bool:
        return self.finished or self._error is not None

    @property
    def lost(self) -> bool:
        """Answered, or about to be, and nobody has the whole answer or waits for it."""
        return (self.finished or (self.settling and self._error is None)) and not (self._readers or self.delivered)

    def not_read(self) -> None:
        """The client of a delivered answer closed its connection with parts of it unread. Believed once for a call:
        a client that always does so would never get another answer."""
        if not self._redelivered:
            self._redelivered = True
            self.delivered = False

    def emit(self, event: CallEvent) -> None:
        self._events.append(event)
        self._wake()

    def fail(self, error: CallError) -> None:
        self._error = error
        self._wake()

    def follow(self) -> "Reader":
        return Reader(self)

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class Reader:
    """Reads a call's events once, in order. Use as a context manager; leaving it means that the client is gone."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._position = 0

    def __enter__(self) -> Self:
        self._call._readers += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._call._readers -= 1
        if not self._call._readers and not self._call.done:
            self._call.on_abandoned()

    async def next(self, timeout_s: float | None) -> list[CallEvent]:
        """The events that are new since the last time; empty when none came in time. Raises the call's error."""
        call = self._call
        if self._position == len(call._events) and call._error is None:
            try:
                async with asyncio.timeout(timeout_s):
                    await call._news.wait()
            except TimeoutError:
                return []
        fresh = call._events[self._position :]
        if not fresh and call._error is not None:
            raise call._error
        self._position += len(fresh)
        return fresh
