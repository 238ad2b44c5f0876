"""A model call as its readers see it: a growing list of events that any number of HTTP answers follow from the start.

A retry of a running call attaches as one more reader; a retry of a finished one reads the same events again. When the
last reader leaves before the end, the call is abandoned.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from gyre.proxy.dialects.base import Delta, TurnEnd, TurnHead
from gyre.proxy.errors import CallError

CallEvent = Delta | TurnEnd


class Call:
    def __init__(self, head: TurnHead, key: bytes) -> None:
        self.head = head
        self.key = key
        """Retry identity: requests of one execution with equal keys are the same call."""
        self.task: asyncio.Task[None] | None = None
        self.settling = False
        """Being recorded, as an answer or as an orphan: nothing may interrupt that."""
        self.on_abandoned: Callable[[], None] = lambda: None
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

    def __init__(self, call: Call) -> None:
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
