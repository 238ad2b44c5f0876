"""What happens between two bursts (paper §4.2).

Order: final update → satellites return → copy for a checkpoint → publication → the core stays or leaves → dispatch.
The checkpoint is written meanwhile.
"""

from gyre.control.base import Probe
from gyre.control.board import Board
from gyre.control.checkpoints import Checkpoints
from gyre.control.dispatch import Dispatcher
from gyre.control.rollout import Rollout
from gyre.control.transitions import Transitions
from gyre.core.errors import InvariantViolation
from gyre.core.events import PublicationProbed, Published
from gyre.scheduling.staleness import StalenessAccount


class Boundary:
    def __init__(
        self,
        board: Board,
        rollout: Rollout,
        transitions: Transitions,
        dispatcher: Dispatcher,
        checkpoints: Checkpoints,
        staleness: StalenessAccount,
    ) -> None:
        self._board = board
        self._rollout = rollout
        self._transitions = transitions
        self._dispatcher = dispatcher
        self._checkpoints = checkpoints
        self._staleness = staleness
        self._bursts = 0

    async def pass_burst(self, last: bool) -> None:
        """From the final update of a burst to the dispatch for the next one. After the `last` burst of the run nothing
        goes on."""
        board, config = self._board, self._board.config
        self._bursts += 1
        await self._transitions.end_burst()
        if last or self._bursts % config.checkpoint_every == 0:
            await self._checkpoints.save(board.version)
        board.show(f"publishing version {board.version}")
        started = board.clock.now()
        probes = await self._rollout.publish(board.version)
        self._published(probes, started)
        if board.burst.steps == config.mu:
            self._check_staleness()
        if last:
            return
        board.burst.guard = None
        board.begin_batch()
        await self._transitions.reopen()
        if config.dispatch == "boundary":
            self._dispatcher.dispatch(config.mu * config.B)
        board.sample()

    def _published(self, probes: list[Probe], started: float) -> None:
        board = self._board
        now = board.clock.now()
        board.record(Published(t=now, version=board.version, seconds=now - started))
        for probe in probes:
            board.record(
                PublicationProbed(
                    t=now,
                    version=board.version,
                    cell=probe.cell,
                    tokens=probe.tokens,
                    logprob_gap_max=probe.logprob_gap_max,
                )
            )

    def _check_staleness(self) -> None:
        board = self._board
        try:
            self._staleness.publication(board.ledger.ages(board.published))
        except InvariantViolation as error:
            board.broken("staleness", error)
            raise
