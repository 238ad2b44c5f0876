"""The training loop: one batch after the other, an update each, a publication after the last one of a burst.

Order at a burst's end (paper §4.2): final update → satellites return → copy for a checkpoint → publication →
the core stays or leaves → dispatch. The checkpoint is written meanwhile.
"""

from typing import Generic

from gyre.control.base import Cells, Probe, UpdateStats, W
from gyre.control.batches import Batch, Packer
from gyre.control.board import Board
from gyre.control.checkpoints import Checkpoints
from gyre.control.dispatch import Dispatcher
from gyre.control.members import Members
from gyre.control.rollout import Rollout
from gyre.control.transitions import Transitions
from gyre.core.drift import gap_rise, merged
from gyre.core.errors import GroupBroken, InvariantViolation
from gyre.core.events import LogprobGapGrew, PublicationProbed, Published, StepDone
from gyre.scheduling.policies import Policy
from gyre.scheduling.staleness import StalenessAccount


class TrainingLoop(Generic[W]):
    def __init__(
        self,
        board: Board,
        cells: Cells[W],
        packer: Packer[W],
        members: Members,
        rollout: Rollout[W],
        transitions: Transitions[W],
        dispatcher: Dispatcher,
        checkpoints: Checkpoints[W],
        policy: Policy,
    ) -> None:
        self._board = board
        self._cells = cells
        self._packer = packer
        self._members = members
        self._rollout = rollout
        self._transitions = transitions
        self._dispatcher = dispatcher
        self._checkpoints = checkpoints
        self._policy = policy
        config = board.config
        ages = list(board.ledger.ages(board.published))
        self._staleness = StalenessAccount(mu=config.mu, batch_groups=config.B, ages=ages)
        self._bursts = 0
        self._gaps: list[float] = []
        self.reward_mean: float | None = None

    async def run(self, max_steps: int) -> None:
        """Returns when the policy version is `max_steps` and its checkpoint is complete."""
        board = self._board
        while board.version < max_steps:
            board.burst_steps = min(board.config.mu, max_steps - board.version)
            board.open_burst()
            self._transitions.burst_over = False
            for i in range(board.burst_steps):
                board.first_of_burst = i == 0
                await self._step(final=i + 1 == board.burst_steps)
            await self._end_burst(last=board.version >= max_steps)
        await self._checkpoints.settle()

    async def _step(self, final: bool) -> None:
        board = self._board
        batch: Batch[W] = Batch(version=board.version, size=board.config.B, started=board.clock.now())
        self._packer.open(batch)
        broken = 0
        stats: UpdateStats | None = None
        while stats is None:
            await board.signal.until(lambda: batch.complete and self._transitions.sound)
            async with self._transitions.window:
                if not (batch.complete and self._transitions.sound):
                    continue
                board.phase = f"updating to version {batch.step}"
                members = self._transitions.members
                try:
                    stats = await self._members.attempt(self._cells.update(members))
                except GroupBroken:
                    # Which satellites' gradients arrived is unknown; the core's own is intact.
                    broken += 1
                    if broken > self._members.limits.losses:
                        raise
                    await self._transitions.drop(1)
                    continue
                if stats.version != batch.step:
                    raise InvariantViolation(f"The core is at version {stats.version} after step {batch.step}.")
                self._packer.close()
                board.version = stats.version
                if final:
                    self._transitions.burst_over = True
                else:
                    await self._transitions.renew()
        self._account(batch, stats, members)

    async def _end_burst(self, last: bool) -> None:
        board, config = self._board, self._board.config
        self._bursts += 1
        if self._policy.releases:
            board.phase = "satellites return to rollout"
            await self._transitions.end_burst()
        if last or self._bursts % config.checkpoint_every == 0:
            await self._checkpoints.save(board.version)
        board.phase = f"publishing version {board.version}"
        started = board.clock.now()
        probes = await self._rollout.publish(board.version)
        self._published(probes, started)
        if board.burst_steps == config.mu:
            self._check_staleness()
        if last:
            return
        board.close_burst()
        board.needed = config.B
        stays = self._policy.decide(board.situation(boundary=True)).training > 0
        await self._transitions.reopen(stays)
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

    def _account(self, batch: Batch[W], stats: UpdateStats, members: int) -> None:
        board = self._board
        now = board.clock.now()
        results = batch.results()
        gap_count = sum(result.gap_count for result in results)
        gap_mean = sum(result.gap_sum for result in results) / gap_count if gap_count else 0.0
        staleness = [batch.version - group.version for group in batch.groups]
        self._staleness.step(staleness)
        self.reward_mean = batch.reward_mean()
        board.record(
            StepDone(
                t=now,
                step=batch.step,
                groups=[group.group for group in batch.groups],
                staleness=staleness,
                reward_mean=self.reward_mean,
                loss=sum(result.loss for result in results),
                grad_norm=stats.grad_norm,
                cells=list(range(members)),
                logprob_gap_count=gap_count,
                logprob_gap_mean=gap_mean,
                logprob_gap_max=max((result.gap_max for result in results), default=0.0),
                ratios=merged(result.ratios for result in results),
                replayed=sum(result.replayed for result in results),
                unrecorded=sum(result.unrecorded for result in results),
                clipped_executions=sum(result.clipped_executions for result in results),
                executions=sum(result.executions for result in results),
                targets=sum(result.targets for result in results),
                seconds=now - batch.started,
            )
        )
        if gap_count:
            self._gaps.append(gap_mean)
            rise = gap_rise(self._gaps)
            if rise:
                board.record(LogprobGapGrew(t=now, step=batch.step, rise=rise))
        board.sample()
