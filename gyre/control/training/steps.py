"""One optimizer step: a batch is opened, cells claim and process it, the core updates, the journal gets the sums."""

from gyre.control.recovery import Recovery
from gyre.control.shared_state import SharedState
from gyre.control.training.batches import Batch, MicroStepQueue
from gyre.control.training.training_set import TrainingSet
from gyre.core.drift import gap_rise
from gyre.core.errors import GroupBroken, InvariantViolation
from gyre.core.events import LogprobGapGrew, StepDone
from gyre.scheduling.staleness import StalenessAccount
from gyre.training.base import StepStats


class Steps:
    def __init__(
        self,
        state: SharedState,
        recovery: Recovery,
        queue: MicroStepQueue,
        training: TrainingSet,
        staleness: StalenessAccount,
    ) -> None:
        self._state = state
        self._recovery = recovery
        self._queue = queue
        self._training = training
        self._staleness = staleness
        self._gaps: list[float] = []
        self.reward_mean: float | None = None
        """Of the last step."""

    async def run(self) -> None:
        """Returns when the update is done and, inside a burst, every cell has the new weights. Raises LineBroken, or
        WorkerLost, when the core's trainer is lost."""
        state = self._state
        state.require_line()
        state.burst.taken += 1
        batch = Batch(version=state.version, size=state.config.groups_per_step, started=state.clock.now())
        self._queue.open(batch)
        stats: StepStats | None = None
        while stats is None:
            await state.signal.until(lambda: state.line_broken or (batch.complete and self._training.all_alive))
            async with self._training.window:
                state.require_line()
                if not (batch.complete and self._training.all_alive):
                    continue
                state.show(f"updating to version {batch.step}")
                cells = self._training.size
                try:
                    stats = await self._recovery.attempt(self._recovery.cells.update(cells))
                except GroupBroken as error:
                    # Which satellites' gradients arrived is unknown; the core's own is intact.
                    pause = self._recovery.setbacks.note("the reduction", str(error), state.clock.now(), state.best)
                    await state.clock.sleep(pause)
                    await self._training.drop(1)
                    continue
                if stats.version != batch.step:
                    raise InvariantViolation(f"The core is at version {stats.version} after step {batch.step}.")
                self._queue.close()
                state.ledger.consume([group.group for group in batch.groups], stats.version)
                state.stepped(stats.version)
                if state.burst.last_step:
                    state.burst.over = True
                else:
                    await self._training.renew()
        self._account(batch, stats, cells)

    def _account(self, batch: Batch, stats: StepStats, cells: int) -> None:
        state = self._state
        now = state.clock.now()
        total = batch.total()
        gap_mean = total.gap_sum / total.gap_count if total.gap_count else 0.0
        staleness = [batch.version - group.version for group in batch.groups]
        self._staleness.step(staleness)
        self.reward_mean = batch.reward_mean()
        state.record(
            StepDone(
                t=now,
                step=batch.step,
                groups=[group.group for group in batch.groups],
                staleness=staleness,
                reward_mean=self.reward_mean,
                loss=total.loss,
                grad_norm=stats.grad_norm,
                cells=list(range(cells)),
                logprob_gap_count=total.gap_count,
                logprob_gap_mean=gap_mean,
                logprob_gap_max=total.gap_max,
                ratios=total.ratios,
                replayed=total.replayed,
                unrecorded=total.unrecorded,
                clipped_executions=total.clipped_executions,
                executions=total.executions,
                targets=total.targets,
                seconds=now - batch.started,
            )
        )
        if total.gap_count:
            self._gaps.append(gap_mean)
            rise = gap_rise(self._gaps)
            if rise:
                state.record(LogprobGapGrew(t=now, step=batch.step, rise=rise))
        state.sample()
