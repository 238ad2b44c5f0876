"""The only brain of a run: small tasks that share one `Board`, for the live run and the simulator alike.

Tasks: launcher (starts queued executions), one per execution, joins (moves cells into training), packer (fills the
batch), one per training cell (claims micro-steps), and the training loop, which decides when the run is over.
"""

import asyncio
from typing import Generic

from gyre.control.base import Cells, Executions, Journal, Materializer, Queries, W
from gyre.control.batches import Packer
from gyre.control.board import Board
from gyre.control.checkpoints import Checkpoints
from gyre.control.crew import Crew
from gyre.control.dispatch import Dispatcher
from gyre.control.members import Limits, Members
from gyre.control.rollout import Rollout
from gyre.control.state import FRESH, ControlState, ControlView
from gyre.control.training import TrainingLoop
from gyre.control.transitions import Transitions
from gyre.core.clock import Clock
from gyre.scheduling.config import SchedulerConfig, require
from gyre.scheduling.order import LaunchOrder, make_order
from gyre.scheduling.policies import Policy, make_policy


class Controller(Generic[W]):
    """Build and run inside one event loop."""

    def __init__(
        self,
        config: SchedulerConfig,
        clock: Clock,
        queries: Queries,
        executions: Executions,
        materializer: Materializer[W],
        cells: Cells[W],
        journal: Journal,
        initial: ControlState = FRESH,
        order: LaunchOrder | None = None,
        policy: Policy | None = None,
        limits: Limits = Limits(),
        lanes: int = 1,
    ) -> None:
        """Raises ConfigError for an impossible configuration. `order` and `policy` default to what the config names;
        `lanes` is how many micro-steps a cell has under way at a time."""
        self._board = Board(require(config), clock, journal, initial.version)
        self._initial = initial
        self._execution_crew, self._cell_crew, self._checkpoint_crew = Crew(), Crew(), Crew()
        policy = policy or make_policy(config)
        order = order or make_order(config.launch_order)
        self._members = Members(self._board, cells, self._cell_crew, limits)
        self._rollout: Rollout[W] = Rollout(self._board, cells, self._members)
        self._dispatcher = Dispatcher(
            self._board,
            queries,
            executions,
            self._execution_crew,
            initial,
            order,
            ready=lambda: not self._rollout.starved,
        )
        self._packer = Packer(self._board, materializer)
        self._transitions = Transitions(
            self._board, cells, self._members, self._rollout, self._packer, policy, self._cell_crew, lanes
        )
        self._dispatcher.restore(initial)
        self._training = TrainingLoop(
            self._board,
            cells,
            self._packer,
            self._members,
            self._rollout,
            self._transitions,
            self._dispatcher,
            Checkpoints(self._board, cells, self._members, self._checkpoint_crew),
            policy,
        )
        self._max_steps = config.max_steps

    async def run(self, max_steps: int | None = None) -> None:
        """Trains until the policy version is `max_steps` (default: the config's), then ends every execution.

        Cancellation and failures end executions first, then cells; a checkpoint that is being written is completed. The
        first failure is raised (an InvariantViolation is in the journal by then).
        """
        self._max_steps = self._board.config.max_steps if max_steps is None else max_steps
        crews = (self._execution_crew, self._cell_crew, self._checkpoint_crew)
        main = self._cell_crew.spawn(self._main(), "training loop")
        try:
            await asyncio.wait({main, *(crew.failure for crew in crews)}, return_when=asyncio.FIRST_COMPLETED)
            for crew in crews:
                if crew.failure.done():
                    crew.failure.result()
        finally:
            self._dispatcher.open = False
            # A cancellation that comes only now must not leave a crew at work.
            try:
                await self._execution_crew.stop()
            finally:
                try:
                    await self._cell_crew.stop()
                finally:
                    await self._checkpoint_crew.finish()

    async def _main(self) -> None:
        board = self._board
        board.phase = "starting engines"
        self._dispatcher.fill()
        self._cell_crew.spawn(self._members.watch(), "losses")
        self._cell_crew.spawn(self._rollout.guard(), "engines alive")
        await self._transitions.start()
        self._dispatcher.open = True
        board.sample()
        self._cell_crew.spawn(self._dispatcher.run(), "launcher")
        self._cell_crew.spawn(self._packer.run(), "packer")
        self._cell_crew.spawn(self._transitions.joins(), "joins")
        await self._training.run(self._max_steps)
        board.phase = "finished"

    def view(self) -> ControlView:
        """What is going on now; never blocks, changes nothing."""
        board, ledger, batch = self._board, self._board.ledger, self._packer.batch
        return ControlView(
            time=board.clock.now(),
            step=board.version,
            max_steps=self._max_steps,
            version=board.version,
            published=board.published,
            phase=self._phase(),
            queued=ledger.queued,
            running=ledger.running,
            closed=ledger.f,
            waterlevel=ledger.waterlevel,
            capacity=board.capacity,
            ready_groups=ledger.ready,
            roles=list(board.roles),
            members=self._transitions.members,
            batch_groups_taken=0 if batch is None else len(batch.groups),
            batch_groups_done=0 if batch is None else batch.groups_done,
            batch_groups=board.config.B,
            reward_mean=self._training.reward_mean,
        )

    def _phase(self) -> str:
        """What the training side does or waits for."""
        board, batch = self._board, self._packer.batch
        if batch is None or batch.complete:
            return board.phase
        if self._rollout.starved:
            return f"step {batch.step}: no rollout engine is alive; waiting for a new process"
        if self._transitions.members:
            return f"step {batch.step}: {batch.groups_done} of {batch.size} groups trained"
        ledger, config = board.ledger, board.config
        room = board.capacity - config.C_e
        if ledger.waterlevel > room:
            return f"step {batch.step}: the core joins when outstanding executions fall to {room}"
        supply = f"{config.supply_groups:g} groups have been ready for {config.tau_s:g} s"
        return f"step {batch.step}: the core joins when {supply}"
