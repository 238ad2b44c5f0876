"""The cells that are registered for training: always a prefix 0, 1, … of the cells; owner of the trainers.

A registered cell has pulled the core's weights of the open batch and claims micro-steps of it. A satellite whose
trainer is lost stops the training of all satellites above it, because gradients are summed over a prefix of cells:
what they had claimed goes back to the queue. They stay out of rollout and register again, in index order and with zero
gradients, as soon as the lost one has a new process: in this batch if it is still open, otherwise in the next one of
the burst.
"""

import asyncio
from collections.abc import Callable

from gyre.control.base import WorkerLost
from gyre.control.recovery import CORE, Recovery
from gyre.control.shared_state import SharedState
from gyre.control.task_supervisor import TaskSupervisor, together
from gyre.control.training.batches import MicroStepQueue
from gyre.control.training.training_cell import TrainingCell
from gyre.core.events import CellJoined, MicroStepsReturned


class TrainingSet:
    def __init__(self, state: SharedState, recovery: Recovery, queue: MicroStepQueue, tasks: TaskSupervisor) -> None:
        self._state = state
        self._recovery = recovery
        self._queue = queue
        self._tasks = tasks
        self._workers: list[TrainingCell] = []
        self.window = asyncio.Lock()
        """Held while a cell pulls weights and registers, while the core updates, and while cells are dropped from the
        batch: never two of them at a time."""

    @property
    def size(self) -> int:
        """Cells registered for training: always the prefix 0..size−1."""
        return len(self._workers)

    @property
    def all_alive(self) -> bool:
        """No registered cell is known to be lost."""
        return all(self._recovery.alive("trainer", worker.cell) for worker in self._workers)

    @property
    def about_to_take(self) -> bool:
        """A registered cell is about to take a ready group, which is no supply for another cell."""
        return self._queue.wants_work()

    @property
    def next_may_register(self) -> bool:
        """The next cell of the prefix has left rollout, is in no batch, and has a living trainer."""
        state, cell = self._state, self.size
        return (
            not state.burst.over
            and cell < state.training
            and state.roles[cell] == "training"
            and self._recovery.alive("trainer", cell)
        )

    async def register_next(self) -> None:
        """In the window: the next cell of the prefix pulls the weights that the current batch trains and starts
        claiming. A cell that joins between two batches takes part from the next one. One without a living trainer stays
        out until it has one."""
        state, batch, cell = self._state, self._queue.batch, self.size
        if state.burst.over or not await self._enter_training(cell):
            return
        self._workers.append(TrainingCell(cell, state, self._recovery, self._queue, self._tasks))
        state.roles[cell] = "training"
        state.record(
            CellJoined(
                t=state.clock.now(),
                cell=cell,
                step=state.version + 1,
                version=state.version,
                late=batch is not None and batch.processed_micro_steps > 0,
            )
        )

    async def renew(self) -> None:
        """After an update: every registered cell gets the new weights and zero gradients."""
        await together(*(self._enter_training(worker.cell) for worker in self._workers))

    async def release(self, first: int) -> dict[int, int]:
        """Cells `first`, `first` + 1, … claim no more: their batch is complete. Micro-steps that each has processed."""
        released, self._workers = self._workers[first:], self._workers[:first]
        for worker in released:
            await worker.stop()
        return {worker.cell: worker.micro_steps for worker in released}

    async def drop(self, first: int) -> None:
        """In the window: takes cells `first`, `first` + 1, … out of the batch; their gradients count no more."""
        state, batch = self._state, self._queue.batch
        for cell in await self.release(first):
            returned = self._queue.give_back(cell)
            if returned and batch is not None:
                state.record(MicroStepsReturned(t=state.clock.now(), cell=cell, step=batch.step, micro_steps=returned))

    async def gone(self, cell: int) -> None:
        async with self.window:
            await self.drop(cell)
            if cell == CORE.cell:
                self._queue.abandon()

    async def back(self, cell: int, alive: Callable[[], None]) -> None:
        """`Transitions.joins` sees which satellite may register. The core goes back to its checkpoint, which the
        training loop waits for."""
        if cell == CORE.cell:
            version = await self._recovery.cells.go_back()
            self._state.go_back(version)
        alive()

    async def _enter_training(self, cell: int) -> bool:
        """False when the cell's trainer is lost."""
        call = self._recovery.cells.enter_training(cell, self._state.version)
        try:
            await self._recovery.attempt(call)
        except WorkerLost:
            return False
        return True
