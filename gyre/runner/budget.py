"""The overall budget of an execution: it runs while the execution does something, and stands still while it waits for
a place that others hold (a boot, a grader) or for the platform's own word."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self


class Budget:
    """Used once, as an asynchronous context: TimeoutError is raised out of it when the seconds are spent."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._timeout: asyncio.Timeout | None = None
        self._pauses = 0

    async def __aenter__(self) -> Self:
        self._timeout = asyncio.timeout(None)
        await self._timeout.__aenter__()
        self._run()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        assert self._timeout is not None
        timeout, self._timeout = self._timeout, None
        await timeout.__aexit__(kind, error, at)

    @property
    def left(self) -> float:
        """Seconds that are not spent."""
        end = self._timeout.when() if self._timeout is not None else None
        return self._left if end is None else end - asyncio.get_running_loop().time()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time in here is not spent. Pauses may overlap."""
        self._pauses += 1
        if self._timeout is not None and (end := self._timeout.when()) is not None and not self._timeout.expired():
            self._left = end - asyncio.get_running_loop().time()
            self._timeout.reschedule(None)
        try:
            yield
        finally:
            self._pauses -= 1
            self._run()

    def _run(self) -> None:
        if self._timeout is not None and not self._pauses and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._left)
