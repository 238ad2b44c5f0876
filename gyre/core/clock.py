"""Time enters Gyre only through a `Clock`, so that the simulator can run the real controller."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since an arbitrary origin; never goes back."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """Wall time, origin at construction so that journals of one run start near zero."""

    def __init__(self, origin: float | None = None) -> None:
        self._origin = time.monotonic() if origin is None else origin

    def now(self) -> float:
        return time.monotonic() - self._origin

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
