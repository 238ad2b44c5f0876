"""One optimizer step: a batch is opened, cells claim and process it, the core updates, the journal gets the sums."""

from gyre.control.base import UpdateStats
from gyre.control.batches import Batch, Packer
from gyre.control.board import Board
from gyre.control.members import Members
from gyre.control.training_set import TrainingSet
from gyre.core.drift import gap_rise, merged
from gyre.core.errors import GroupBroken, InvariantViolation
from gyre.core.events import LogprobGapGrew, StepDone
from gyre.scheduling.staleness import StalenessAccount


class Steps:
    def __init__(
        self, board: Board, members: Members, packer: Packer, training: TrainingSet, staleness: StalenessAccount
    ) -> None:
        self._board = board
        self._members = members
        self._packer = packer
        self._training = training
        self._staleness = staleness
        self._gaps: list[float] = []
        self.reward_mean: float | None = None
        """Of the last step."""

    async def run(self) -> None:
        """Returns when the update is done and, inside a burst, every cell has the new weights."""
        board = self._board
        board.burst.taken += 1
        batch = Batch(version=board.version, size=board.config.B, started=board.clock.now())
        self._packer.open(batch)
        broken = 0
        stats: UpdateStats | None = None
        while stats is None:
            await board.signal.until(lambda: batch.complete and self._training.sound)
            async with self._training.window:
                if not (batch.complete and self._training.sound):
                    continue
                board.show(f"updating to version {batch.step}")
                cells = self._training.size
                try:
                    stats = await self._members.attempt(self._members.cells.update(cells))
                except GroupBroken:
                    # Which satellites' gradients arrived is unknown; the core's own is intact.
                    broken += 1
                    if broken > self._members.limits.losses:
                        raise
                    await self._training.drop(1)
                    continue
                if stats.version != batch.step:
                    raise InvariantViolation(f"The core is at version {stats.version} after step {batch.step}.")
                self._packer.close()
                board.stepped(stats.version)
                if board.burst.last_step:
                    board.burst.over = True
                else:
                    await self._training.renew()
        self._account(batch, stats, cells)

    def _account(self, batch: Batch, stats: UpdateStats, cells: int) -> None:
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
                cells=list(range(cells)),
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
