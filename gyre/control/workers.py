"""One training cell: claim a micro-step, process it, claim the next.

A satellite that fails loses its unreduced gradient, so everything it claimed in this batch goes back and it enters the
batch again with zero gradients; a second failure in the same batch, or any failure of the core, ends the run.
"""

import asyncio
from typing import Generic

from gyre.control.base import Cells, W
from gyre.control.batches import Batch, Packer
from gyre.control.board import Board
from gyre.control.crew import Crew
from gyre.core.errors import GyreError, InvariantViolation
from gyre.core.events import MicroStepDone, ProcessLost


class Worker(Generic[W]):
    def __init__(
        self, cell: int, board: Board, cells: Cells[W], packer: Packer[W], window: asyncio.Lock, crew: Crew
    ) -> None:
        self.cell = cell
        self.micro_steps = 0
        """Processed since the cell joined."""
        self._board = board
        self._cells = cells
        self._packer = packer
        self._window = window
        self._failed_version: int | None = None
        self._claim = packer.claim(cell)
        self._task = crew.spawn(self._run(), f"cell {cell}")

    async def stop(self) -> None:
        """Only between batches, when the cell waits for work."""
        self._packer.withdraw(self._claim)
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        while True:
            work = await self._claim
            batch = self._packer.batch
            if batch is None:
                raise InvariantViolation(f"Cell {self.cell} got a micro-step of no batch.")
            started = self._board.clock.now()
            try:
                result = await self._cells.train(self.cell, work)
            except GyreError as error:
                await self._recover(batch, error)
                self._claim = self._packer.claim(self.cell)
                continue
            now = self._board.clock.now()
            self.micro_steps += 1
            self._board.record(
                MicroStepDone(
                    t=now,
                    cell=self.cell,
                    step=batch.step,
                    micro_step=work.micro_step_id,
                    groups=work.groups,
                    tokens=work.tokens,
                    targets=result.targets,
                    seconds=now - started,
                )
            )
            self._packer.finished(self.cell, result)
            self._claim = self._packer.claim(self.cell)

    async def _recover(self, batch: Batch[W], error: GyreError) -> None:
        if self.cell == 0 or self._failed_version == batch.version:
            raise error
        self._failed_version = batch.version
        # The window keeps the update out until this cell's gradient is zero again: the batch cannot complete before the
        # claims are returned, and cannot be reduced before the window opens.
        async with self._window:
            returned = self._packer.give_back(self.cell)
            self._board.record(
                ProcessLost(
                    t=self._board.clock.now(),
                    name=f"training cell {self.cell}",
                    detail=f"{returned} micro-steps of step {batch.step} returned: {error}",
                )
            )
            await self._cells.enter_training(self.cell, batch.version)
