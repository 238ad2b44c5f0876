"""Role transitions of cells, serial and in prefix order, in the order of docs/transitions.md; owner of the trainers.

R→T: stop admitting → leave_rollout (calls move elsewhere) → enter_training (pull the core's weights of this batch) →
register → claim. T→R mirrors it: stop claiming → leave_training → enter_rollout → admit.

A satellite whose trainer is lost stops the training of all satellites above it, because gradients are summed over a
prefix of cells: what they had claimed goes back to the queue. They stay out of rollout and register again, in index
order and with zero gradients, as soon as the lost one has a new process: in this batch if it is still open, otherwise
in the next one of the burst.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Generic

from gyre.control.base import NO_CALLS, Cells, Handoff, MemberLost, W
from gyre.control.batches import Packer
from gyre.control.board import Board
from gyre.control.crew import Crew, together
from gyre.control.members import Members
from gyre.control.rollout import Rollout
from gyre.control.workers import Worker
from gyre.core.events import (
    CellJoined,
    CellLeft,
    MicroStepsReturned,
    Role,
    TransitionFinished,
    TransitionStarted,
)
from gyre.scheduling.policies import Decision, Policy


class Transitions(Generic[W]):
    def __init__(
        self,
        board: Board,
        cells: Cells[W],
        health: Members,
        rollout: Rollout[W],
        packer: Packer[W],
        policy: Policy,
        crew: Crew,
        lanes: int,
    ) -> None:
        """`lanes`: micro-steps that a cell has under way at a time."""
        self._board = board
        self._cells = cells
        self._health = health
        self._rollout = rollout
        self._packer = packer
        self._policy = policy
        self._crew = crew
        self._lanes = lanes
        self._workers: list[Worker[W]] = []
        self._serial = asyncio.Lock()
        self.window = asyncio.Lock()
        """Held while a cell pulls weights and registers, while the core updates, and while cells are dropped from the
        batch: never two of them at a time."""
        self.burst_over = False
        """The burst's last update is done: no cell may join before the next burst, whose groups are queued then."""
        health.owners["trainer"] = self

    @property
    def members(self) -> int:
        """Cells registered for training: always the prefix 0..members−1."""
        return len(self._workers)

    @property
    def sound(self) -> bool:
        """No member is known to be lost."""
        return all(self._health.alive("trainer", worker.cell) for worker in self._workers)

    async def start(self) -> None:
        """Puts every engine and cell into its first role; nothing is admitted before."""
        board = self._board
        board.training = 0 if self._policy.releases else board.config.K
        serving = self._rollout.order(board.training)
        await together(*(self._rollout.enter(engine) for engine in serving))
        for cell in range(board.training):
            board.roles[cell] = "training"
            async with self.window:
                if self.members == cell:
                    await self._register(cell)
        await self._rollout.admit(serving)

    async def joins(self) -> None:
        """Moves the next cell into training whenever the policy says so, and registers cells that are in training and
        in no batch; ends only by cancellation.

        Claims come first: a group that a waiting cell is about to take is no supply for another cell.
        """
        board = self._board
        while True:
            await board.signal.until(lambda: self._may_register() or self._decision() is not None)
            async with self._serial:
                if self._may_register():
                    async with self.window:
                        await self._register(self.members)
                    continue
                decision = self._decision()
                if decision is not None and decision.training > board.training:
                    await self._join(board.training)
                    continue
            if decision is not None and decision.recheck_at is not None:
                await self._another_decision(decision, decision.recheck_at)

    async def renew(self) -> None:
        """After an update: every member gets the new weights and zero gradients."""
        await together(*(self._enter_training(worker.cell) for worker in self._workers))

    async def end_burst(self) -> None:
        """After the final update: a transition under way ends, then all satellites return to rollout at once."""
        async with self._serial:
            roles = self._board.roles
            satellites = [cell for cell in range(1, self._board.training) if roles[cell] == "training"]
            workers, self._workers = self._workers[1:], self._workers[:1]
            for worker in workers:
                await worker.stop()
            done = {worker.cell: worker.micro_steps for worker in workers}
            await together(*(self._leave(cell, done.get(cell, 0)) for cell in reversed(satellites)))

    async def reopen(self, stays: bool) -> None:
        """After the publication: returned cells admit again; who still trains leaves (the core) or enters the
        next burst with zero gradients."""
        board = self._board
        training = 1 if self._policy.releases else board.config.K
        await self._rollout.admit(self._rollout.order(training))
        board.training = training
        if stays:
            async with self.window:
                await self.renew()
        else:
            # Before the next batch opens: the core must not claim from it, nor may another cell join meanwhile.
            await self._serial.acquire()
            core = self._workers.pop()
            await core.stop()
            self._crew.spawn(self._core_leaves(core.micro_steps), "core leaves training")

    async def drop(self, first: int) -> None:
        """Takes cells `first`, `first` + 1, … out of the batch, in the window: their gradients count no more."""
        board, batch = self._board, self._packer.batch
        dropped, self._workers = self._workers[first:], self._workers[:first]
        for worker in dropped:
            await worker.stop()
        for worker in dropped:
            returned = self._packer.give_back(worker.cell)
            if returned and batch is not None:
                board.record(
                    MicroStepsReturned(t=board.clock.now(), cell=worker.cell, step=batch.step, micro_steps=returned)
                )

    async def gone(self, cell: int) -> None:
        async with self.window:
            await self.drop(cell)

    async def back(self, cell: int, alive: Callable[[], None]) -> None:  # noqa: ARG002  `joins` sees who may register
        alive()

    async def _core_leaves(self, micro_steps: int) -> None:
        """Lets other transitions go on when it has succeeded; otherwise the run ends."""
        board = self._board
        await self._leave(0, micro_steps)
        await self._rollout.admit(self._rollout.order(0))
        board.training = 0
        board.open_burst()
        board.reset_timer()
        board.changed()
        self._serial.release()

    async def _join(self, cell: int) -> None:
        board = self._board
        started = self._started(cell, "rollout", "training")
        board.training = cell + 1
        board.changed()
        await self._rollout.admit(self._rollout.order(board.training))
        handoff = await self._rollout.leave(cell)
        target: Role = "training"
        async with self.window:
            if self.burst_over:
                target = "rollout"
                await self._rollout.enter(cell)
            elif self.members == cell:
                await self._register(cell)
        self._finished(cell, "rollout", target, started, handoff)
        board.reset_timer()
        board.changed()

    def _may_register(self) -> bool:
        """The next cell of the prefix has left rollout, is in no batch, and has a living trainer."""
        board, cell = self._board, self.members
        return (
            not self.burst_over
            and cell < board.training
            and board.roles[cell] == "training"
            and self._health.alive("trainer", cell)
        )

    async def _register(self, cell: int) -> None:
        """Pulls the weights that the current batch trains and starts claiming. A cell that joins between two batches
        takes part from the next one. One without a living trainer stays out until it has one."""
        board, batch = self._board, self._packer.batch
        if self.burst_over or not await self._enter_training(cell):
            return
        self._workers.append(Worker(cell, board, self._cells, self._health, self._packer, self._crew, self._lanes))
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

    async def _enter_training(self, cell: int) -> bool:
        """False when the cell's trainer is lost."""
        call = self._cells.enter_training(cell, self._board.version)
        try:
            await self._health.attempt(call)
        except MemberLost:
            return False
        return True

    async def _leave(self, cell: int, micro_steps: int) -> None:
        board = self._board
        started = self._started(cell, "training", "rollout")
        board.record(CellLeft(t=started, cell=cell, step=board.version, micro_steps=micro_steps))
        if self._health.alive("trainer", cell):
            # A trainer that is lost here takes its memory with it, and its replacement starts asleep.
            with contextlib.suppress(MemberLost):
                await self._health.attempt(self._cells.leave_training(cell))
        await self._rollout.enter(cell)
        self._finished(cell, "training", "rollout", started, NO_CALLS)

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

    def _finished(self, cell: int, source: Role, target: Role, started: float, calls: Handoff) -> None:
        board = self._board
        now = board.clock.now()
        board.roles[cell] = target
        board.record(
            TransitionFinished(
                t=now,
                cell=cell,
                source=source,
                target=target,
                calls_in_flight=calls.calls_in_flight,
                rerouted=calls.rerouted,
                with_kv=calls.with_kv,
                seconds=now - started,
            )
        )
        board.sample()

    def _decision(self) -> Decision | None:
        """What the policy says, when it says anything."""
        board = self._board
        if self.burst_over or self._packer.hungry() or not self._health.alive("engine", board.training):
            return None
        decision = self._policy.decide(board.situation())
        return decision if decision.training > board.training or decision.recheck_at is not None else None

    async def _another_decision(self, decision: Decision, recheck_at: float) -> None:
        """Returns at `recheck_at`, or when the policy changes its mind before."""
        await self._board.within(recheck_at - self._board.clock.now(), lambda: self._decision() != decision)
