"""One training cell: claim a micro-step, process it, claim the next; as many at a time as the cell has stages.

A cell that is lost loses its unreduced gradient: the worker stops, and `TrainingSet` returns what it had claimed.
"""

import asyncio

from gyre.control.base import MemberLost
from gyre.control.batches import Packer
from gyre.control.board import Board
from gyre.control.crew import Crew
from gyre.control.members import Members
from gyre.core.errors import InvariantViolation
from gyre.core.events import MicroStepDone
from gyre.trajectory.microstep import MicroStep


class Worker:
    def __init__(self, cell: int, board: Board, members: Members, packer: Packer, crew: Crew) -> None:
        self.cell = cell
        self.micro_steps = 0
        """Processed since the cell joined."""
        self._board = board
        self._members = members
        self._packer = packer
        self._claims: set[asyncio.Future[MicroStep]] = set()
        at_once = members.cells.micro_steps_at_once
        self._lanes = {crew.spawn(self._run(self._claim()), f"cell {cell}") for _ in range(at_once)}

    async def stop(self) -> None:
        """Claims nothing any more. A micro-step under way is given up: the cell must enter training again before its
        gradient means anything."""
        for claim in self._claims:
            self._packer.withdraw(claim)
        for lane in self._lanes:
            lane.cancel()
        await asyncio.wait(self._lanes)

    def _claim(self) -> asyncio.Future[MicroStep]:
        claim = self._packer.claim(self.cell)
        self._claims.add(claim)
        return claim

    async def _run(self, claim: asyncio.Future[MicroStep]) -> None:
        while True:
            work = await claim
            self._claims.discard(claim)
            batch = self._packer.batch
            if batch is None:
                raise InvariantViolation(f"Cell {self.cell} got a micro-step of no batch.")
            started = self._board.clock.now()
            try:
                result = await self._members.attempt(self._members.cells.train(self.cell, work))
            except MemberLost:
                return
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
            self._packer.finished(work, result)
            claim = self._claim()
