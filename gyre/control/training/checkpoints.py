"""Checkpoints that are written while the run goes on, one at a time. One whose core is lost is never complete.

The publication waits for the copy of what is saved, not for the disk. Until a checkpoint is complete, a crash goes back
to the one before it; `docs/training.md` says what becomes of what was sampled and trained meanwhile.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from gyre.control.base import WorkerLost
from gyre.control.recovery import Recovery
from gyre.control.shared_state import SharedState
from gyre.control.task_supervisor import TaskSupervisor
from gyre.core.events import CheckpointSaved


class Checkpoints:
    def __init__(self, state: SharedState, recovery: Recovery, tasks: TaskSupervisor) -> None:
        """`tasks` gets the tasks that save: a failure of theirs ends the run, and its end waits for them."""
        self._state = state
        self._recovery = recovery
        self._cells = recovery.cells
        self._tasks = tasks
        self._written: asyncio.Task[None] | None = None
        self._before: int | None = None
        """Version of the newest complete checkpoint."""

    async def save(self, version: int) -> None:
        """Returns when nothing that follows can change what is saved. The checkpoint before is complete then."""
        await self.settle()
        self._state.show(f"copying version {version} for its checkpoint")
        copy = self._tasks.spawn(self._survives(self._cells.checkpoint(version)), f"copy {version}")
        self._written = self._tasks.spawn(self._write(version, copy), f"checkpoint {version}")
        await asyncio.shield(copy)

    async def settle(self) -> None:
        """Returns when no checkpoint is being written."""
        if self._written is not None:
            self._state.show("waiting for the checkpoint to be written")
            await asyncio.shield(self._written)

    async def _write(self, version: int, copy: asyncio.Task[bool]) -> None:
        clock = self._state.clock
        started = clock.now()
        if not await copy:
            return
        copied = clock.now()
        try:
            path = await self._recovery.attempt(self._cells.checkpoint_written(version))
        except WorkerLost:
            return
        now = clock.now()
        self._state.record(
            CheckpointSaved(
                t=now, version=version, path=path, copy_seconds=copied - started, write_seconds=now - copied
            )
        )
        if self._before is not None:
            # Nobody goes back behind the one before, even when the newest is damaged.
            self._state.ledger.cover(self._before)
        self._before = version

    async def _survives(self, call: Coroutine[Any, Any, None]) -> bool:
        """Whether the core lived through the call."""
        try:
            await self._recovery.attempt(call)
        except WorkerLost:
            return False
        return True
