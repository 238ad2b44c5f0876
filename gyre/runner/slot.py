"""Places that a worker's executions share: boots and graders."""

import asyncio


class Slot:
    """One place of a semaphore that may be given back early."""

    def __init__(self, semaphore: asyncio.Semaphore) -> None:
        self._semaphore = semaphore
        self._held = False

    async def take(self) -> None:
        await self._semaphore.acquire()
        self._held = True

    def free(self) -> None:
        if self._held:
            self._held = False
            self._semaphore.release()
