"""The shared state of the controller's tasks, and the one place where a change is noticed.

Every task changes the ledger, the roles or the batch, then calls `changed()`: the invariants are checked, the supply
timer sees the new supply, and whoever waits for what has come true is woken.
"""

import asyncio
from collections.abc import Callable

from gyre.control.base import Journal
from gyre.control.state import ControlState
from gyre.control.training.burst import Burst
from gyre.core.clock import Clock
from gyre.core.errors import InvariantViolation
from gyre.core.events import Event, InvariantBroken, LedgerSampled, Role, RunWentBack
from gyre.scheduling.config import SchedulerConfig, capacity
from gyre.scheduling.ledger import BurstGuard, Group, Ledger
from gyre.scheduling.rules import Situation, SupplyTimer, has_supply


class Signal:
    """Waiting for a condition on the shared state. Conditions are looked at when something changed, by whoever changed
    it, so that a task costs nothing while it has nothing to do."""

    def __init__(self) -> None:
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    def notify(self) -> None:
        """Something changed."""
        for condition, waiter in self._waiters:
            if not waiter.done() and condition():
                waiter.set_result(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition holds, at once if it does."""
        while not condition():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            entry = (condition, waiter)
            self._waiters.append(entry)
            try:
                await waiter
            finally:
                self._waiters.remove(entry)


class LineBroken(Exception):
    """The core's trainer was lost: what the training loop is doing has no future."""


class SharedState:
    def __init__(self, config: SchedulerConfig, clock: Clock, journal: Journal, initial: ControlState) -> None:
        self.config = config
        self.clock = clock
        self.ledger = Ledger(config.executions_per_group, lightest_first=config.launch_order == "longest_first")
        self.signal = Signal()
        self.timer = SupplyTimer()
        self.version = initial.version
        """Steps taken."""
        self.published = initial.version
        self.went_back_to = list(initial.went_back_to)
        """The version of each time that the run went back to a checkpoint."""
        self.line_broken = False
        """The core's trainer was lost, and the training loop does not go on from its checkpoint yet."""
        self.progress = 0
        """Executions that closed and steps that no earlier step of this number preceded: what makes losses bearable."""
        self.best = initial.version
        """The highest version that was ever reached."""
        self.training = 0
        """k: cells out of rollout, always a prefix."""
        self.roles: list[Role] = ["rollout"] * config.cells
        self.needed = config.groups_per_step
        """Groups that the current batch still has to take."""
        self.burst = Burst(config.steps_per_burst)
        self.phase = "starting"
        """What the training side does or waits for."""
        self._journal = journal

    def record(self, event: Event) -> None:
        self._journal.write(event)

    @property
    def capacity(self) -> int:
        return capacity(self.config, self.training)

    async def within(self, seconds: float, condition: Callable[[], bool]) -> bool:
        """Waits for the condition, at most `seconds`; whether it came true."""
        true = asyncio.ensure_future(self.signal.until(condition))
        over = asyncio.ensure_future(self.clock.sleep(seconds))
        try:
            await asyncio.wait({true, over}, return_when=asyncio.FIRST_COMPLETED)
            return true.done()
        finally:
            true.cancel()
            over.cancel()

    def situation(self, *, boundary: bool = False) -> Situation:
        return Situation(
            now=self.clock.now(),
            waterlevel=self.ledger.waterlevel,
            training=self.training,
            ready=self.ledger.ready,
            needed=self.needed,
            supply_since=self.timer.since,
            boundary=boundary,
        )

    def changed(self) -> None:
        """Call after every change; raises InvariantViolation (journaled) when a guarantee is broken."""
        try:
            self.ledger.check(self.capacity)
            if self.burst.guard is not None:
                self.burst.guard.check(self.ledger, self.training)
        except InvariantViolation as error:
            self.broken("ledger", error)
            raise
        self.timer.observe(self.clock.now(), self._has_supply())
        self.signal.notify()

    def broken(self, name: str, error: InvariantViolation) -> None:
        self.record(InvariantBroken(t=self.clock.now(), name=name, detail=str(error)))

    def reset_timer(self) -> None:
        """After every transition and at every batch start."""
        self.timer.reset(self.clock.now(), self._has_supply())

    def show(self, phase: str) -> None:
        """What the training side does from now on, for people."""
        self.phase = phase

    def begin_burst(self, steps: int) -> None:
        self.burst = Burst(steps)
        self.guard_burst()

    def guard_burst(self) -> None:
        """From here d is constant, w falls and the training set grows, until the publication (boundary dispatch
        only)."""
        if self.config.dispatch == "boundary":
            self.burst.guard = BurstGuard(self.ledger, self.training)

    def begin_batch(self) -> None:
        """None of the batch's B groups is taken yet."""
        self.needed = self.config.groups_per_step

    def take_group(self) -> Group:
        """The next ready group, for the batch."""
        self.needed -= 1
        return self.ledger.take()

    def stepped(self, version: int) -> None:
        self.version = version
        if version > self.best:
            self.best = version
            self.progressed()

    def progressed(self) -> None:
        self.progress += 1

    def break_line(self) -> None:
        """The core's trainer is lost: nobody trains until it is back."""
        self.line_broken = True
        self.burst.over = True
        self.burst.guard = None

    def go_back(self, version: int) -> None:
        """The run goes on from the checkpoint of `version`, whose weights are published."""
        lost = self.version
        self.version = self.published = version
        self.went_back_to.append(version)
        again, relabelled = self.ledger.go_back(version)
        now = self.clock.now()
        self.record(RunWentBack(t=now, version=version, lost=lost, ready_again=again, relabelled=relabelled))

    def require_line(self) -> None:
        """Raises LineBroken when the core's trainer was lost since the burst began."""
        if self.line_broken:
            raise LineBroken

    def publish(self, version: int) -> None:
        self.published = version

    def sample(self) -> None:
        ledger = self.ledger
        self.record(
            LedgerSampled(
                t=self.clock.now(),
                d=ledger.d,
                p=ledger.p,
                f=ledger.f,
                capacity=self.capacity,
                ready=ledger.ready,
                grading=ledger.grading,
                roles=list(self.roles),
            )
        )

    def _has_supply(self) -> bool:
        return has_supply(self.config, self.ledger.ready, self.needed)
