"""Role transitions of cells, serial and in prefix order, in exactly the order of DESIGN §4.

R→T: stop admitting → leave_rollout (calls move elsewhere) → enter_training (pull the core's weights of this batch) →
register → claim. T→R mirrors it: stop claiming → leave_training → enter_rollout → admit.
"""

import asyncio
from typing import Generic

from gyre.control.base import Cells, W
from gyre.control.batches import Packer
from gyre.control.board import Board
from gyre.control.crew import Crew
from gyre.control.workers import Worker
from gyre.core.events import CellJoined, CellLeft, Role, TransitionFinished, TransitionStarted
from gyre.scheduling.policies import Decision, Policy


class Transitions(Generic[W]):
    def __init__(self, board: Board, cells: Cells[W], packer: Packer[W], policy: Policy, crew: Crew) -> None:
        self._board = board
        self._cells = cells
        self._packer = packer
        self._policy = policy
        self._crew = crew
        self._workers: list[Worker[W]] = []
        self._serial = asyncio.Lock()
        self.window = asyncio.Lock()
        """Held while a cell pulls weights and registers, and while the core updates: never both."""
        self.burst_over = False
        """The burst's last update is done: no cell may join before the next burst."""

    @property
    def members(self) -> int:
        """Cells registered for training: always the prefix 0..members−1."""
        return len(self._workers)

    def serving(self, training: int) -> list[int]:
        """Engines in the order in which moved calls prefer them: the pool, then rollout cells from the last one."""
        return [*self._board.config.pool, *reversed(range(training, self._board.config.K))]

    async def start(self) -> None:
        """Puts every engine and cell into its first role; nothing is admitted before."""
        board = self._board
        board.training = 0 if self._policy.releases else board.config.K
        serving = self.serving(board.training)
        await asyncio.gather(*(self._cells.enter_rollout(engine, board.version) for engine in serving))
        for cell in range(board.training):
            await self._register(cell)
        await self._cells.set_admitting(serving)

    async def joins(self) -> None:
        """Moves the next cell into training whenever the policy says so; ends only by cancellation.

        Claims come first: a group that a waiting cell is about to take is no supply for another cell.
        """
        board = self._board
        while True:
            await board.signal.until(lambda: self._decision() is not None)
            async with self._serial:
                decision = self._decision()
                if decision is not None and decision.training > board.training:
                    await self._join(board.training)
                    continue
            if decision is not None and decision.recheck_at is not None:
                await self._another_decision(decision, decision.recheck_at)

    async def end_burst(self) -> None:
        """After the final update: a transition under way ends, then all satellites return to rollout at once."""
        async with self._serial:
            satellites, self._workers = self._workers[1:], self._workers[:1]
            for worker in satellites:
                await worker.stop()
            await asyncio.gather(*(self._leave(worker) for worker in reversed(satellites)))

    async def reopen(self, stays: bool) -> None:
        """After the publication: returned cells admit again; who still trains leaves (the core) or enters the
        next burst with zero gradients."""
        board = self._board
        await self._cells.set_admitting(self.serving(self.members))
        board.training = self.members
        self.burst_over = False
        if stays:
            for worker in self._workers:
                await self._cells.enter_training(worker.cell, board.version)
        else:
            # Before the next batch opens: the core must not claim from it, nor may another cell join meanwhile.
            await self._serial.acquire()
            core = self._workers.pop()
            await core.stop()
            self._crew.spawn(self._core_leaves(core), "core leaves training")

    async def _core_leaves(self, core: Worker[W]) -> None:
        board = self._board
        try:
            await self._leave(core)
            await self._cells.set_admitting(self.serving(0))
            board.training = 0
            board.open_burst()
            board.reset_timer()
            board.changed()
        finally:
            self._serial.release()

    async def _join(self, cell: int) -> None:
        board = self._board
        started = self._started(cell, "rollout", "training")
        board.training = cell + 1
        board.changed()
        await self._cells.set_admitting(self.serving(board.training))
        handoff = await self._cells.leave_rollout(cell)
        target: Role = "training"
        async with self.window:
            if self.burst_over:
                target = "rollout"
                await self._cells.enter_rollout(cell, board.published)
            else:
                await self._register(cell)
        self._finished(cell, "rollout", target, started, handoff.calls_in_flight, handoff.rerouted)
        board.reset_timer()
        board.changed()

    async def _register(self, cell: int) -> None:
        """Pulls the weights that the current batch trains and starts claiming. A cell that joins between two batches
        takes part from the next one."""
        board, batch = self._board, self._packer.batch
        await self._cells.enter_training(cell, board.version)
        self._workers.append(Worker(cell, board, self._cells, self._packer, self.window, self._crew))
        board.roles[cell] = "training"
        board.record(
            CellJoined(
                t=board.clock.now(),
                cell=cell,
                step=board.version + 1,
                version=board.version,
                late=batch is not None and batch.processed_micro_steps > 0,
            )
        )

    async def _leave(self, worker: Worker[W]) -> None:
        board, cell = self._board, worker.cell
        started = self._started(cell, "training", "rollout")
        board.record(CellLeft(t=started, cell=cell, step=board.version, micro_steps=worker.micro_steps))
        await self._cells.leave_training(cell)
        await self._cells.enter_rollout(cell, board.published)
        self._finished(cell, "training", "rollout", started, 0, 0)

    def _started(self, cell: int, source: Role, target: Role) -> float:
        board = self._board
        now = board.clock.now()
        board.record(
            TransitionStarted(
                t=now,
                cell=cell,
                source=source,
                target=target,
                waterlevel=board.ledger.waterlevel,
                ready_groups=board.ledger.ready,
            )
        )
        return now

    def _finished(self, cell: int, source: Role, target: Role, started: float, calls: int, rerouted: int) -> None:
        board = self._board
        now = board.clock.now()
        board.roles[cell] = target
        board.record(
            TransitionFinished(
                t=now,
                cell=cell,
                source=source,
                target=target,
                calls_in_flight=calls,
                rerouted=rerouted,
                seconds=now - started,
            )
        )
        board.sample()

    def _decision(self) -> Decision | None:
        """What the policy says, when it says anything."""
        board = self._board
        if self.burst_over or self._packer.hungry():
            return None
        decision = self._policy.decide(board.situation())
        return decision if decision.training > board.training or decision.recheck_at is not None else None

    async def _another_decision(self, decision: Decision, recheck_at: float) -> None:
        """Returns at `recheck_at`, or when the policy changes its mind before."""
        board = self._board
        change = asyncio.ensure_future(board.signal.until(lambda: self._decision() != decision))
        timer = asyncio.ensure_future(board.clock.sleep(recheck_at - board.clock.now()))
        try:
            await asyncio.wait({change, timer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()
            timer.cancel()
