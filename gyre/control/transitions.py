"""Role transitions of cells, serial and in prefix order, in the order of docs/transitions.md.

R→T: stop admitting → leave_rollout (calls move elsewhere) → enter_training (pull the core's weights of this batch) →
register → claim. T→R mirrors it: stop claiming → leave_training → enter_rollout → admit.
"""

import asyncio
import contextlib

from gyre.control.base import NO_CALLS, Handoff, MemberLost
from gyre.control.board import Board
from gyre.control.crew import Crew, together
from gyre.control.members import Members
from gyre.control.rollout import Rollout
from gyre.control.training_set import TrainingSet
from gyre.core.events import CellLeft, Role, TransitionFinished, TransitionStarted
from gyre.scheduling.policies import Decision, Policy


class Transitions:
    def __init__(
        self,
        board: Board,
        members: Members,
        rollout: Rollout,
        training: TrainingSet,
        policy: Policy,
        crew: Crew,
    ) -> None:
        self._board = board
        self._members = members
        self._rollout = rollout
        self._training = training
        self._policy = policy
        self._crew = crew
        self._serial = asyncio.Lock()

    async def start(self) -> None:
        """Puts every engine and cell into its first role; nothing is admitted before."""
        board = self._board
        board.training = 0 if self._policy.releases else board.config.K
        serving = self._rollout.order(board.training)
        await together(*(self._rollout.enter(engine) for engine in serving))
        for cell in range(board.training):
            board.roles[cell] = "training"
            async with self._training.window:
                if self._training.size == cell:
                    await self._training.register_next()
        await self._rollout.admit(serving)

    async def joins(self) -> None:
        """Moves the next cell into training whenever the policy says so, and registers cells that are in training and
        in no batch; ends only by cancellation.

        Claims come first: a group that a waiting cell is about to take is no supply for another cell.
        """
        board = self._board
        while True:
            await board.signal.until(lambda: self._training.next_may_register or self._decision() is not None)
            async with self._serial:
                if self._training.next_may_register:
                    async with self._training.window:
                        await self._training.register_next()
                    continue
                decision = self._decision()
                if decision is not None and decision.training > board.training:
                    await self._join(board.training)
                    continue
            if decision is not None and decision.recheck_at is not None:
                await self._another_decision(decision, decision.recheck_at)

    async def end_burst(self) -> None:
        """After the final update: a transition under way ends, then all satellites return to rollout at once, if the
        policy lets them."""
        if not self._policy.releases:
            return
        self._board.show("satellites return to rollout")
        async with self._serial:
            roles = self._board.roles
            satellites = [cell for cell in range(1, self._board.training) if roles[cell] == "training"]
            done = await self._training.release(1)
            await together(*(self._leave(cell, done.get(cell, 0)) for cell in reversed(satellites)))

    async def reopen(self) -> None:
        """After the publication: returned cells admit again; who still trains leaves (the core) or enters the
        next burst with zero gradients."""
        board = self._board
        stays = self._policy.decide(board.situation(boundary=True)).training > 0
        training = 1 if self._policy.releases else board.config.K
        await self._rollout.admit(self._rollout.order(training))
        board.training = training
        if stays:
            async with self._training.window:
                await self._training.renew()
        else:
            # Before the next batch opens: the core must not claim from it, nor may another cell join meanwhile.
            await self._serial.acquire()
            done = await self._training.release(0)
            self._crew.spawn(self._core_leaves(done[0]), "core leaves training")

    async def _core_leaves(self, micro_steps: int) -> None:
        """Lets other transitions go on when it has succeeded; otherwise the run ends."""
        board = self._board
        await self._leave(0, micro_steps)
        await self._rollout.admit(self._rollout.order(0))
        board.training = 0
        board.guard_burst()
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
        async with self._training.window:
            if board.burst.over:
                target = "rollout"
                await self._rollout.enter(cell)
            elif self._training.size == cell:
                await self._training.register_next()
        self._finished(cell, "rollout", target, started, handoff)
        board.reset_timer()
        board.changed()

    async def _leave(self, cell: int, micro_steps: int) -> None:
        board = self._board
        started = self._started(cell, "training", "rollout")
        board.record(CellLeft(t=started, cell=cell, step=board.version, micro_steps=micro_steps))
        if self._members.alive("trainer", cell):
            # A trainer that is lost here takes its memory with it, and its replacement starts asleep.
            with contextlib.suppress(MemberLost):
                await self._members.attempt(self._members.cells.leave_training(cell))
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
        if board.burst.over or self._training.about_to_take or not self._members.alive("engine", board.training):
            return None
        decision = self._policy.decide(board.situation())
        return decision if decision.training > board.training or decision.recheck_at is not None else None

    async def _another_decision(self, decision: Decision, recheck_at: float) -> None:
        """Returns at `recheck_at`, or when the policy changes its mind before."""
        await self._board.within(recheck_at - self._board.clock.now(), lambda: self._decision() != decision)
