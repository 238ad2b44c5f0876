"""Who is alive, and the one way in which Gyre deals with a worker that is gone, whatever it was and whoever noticed.

A loss is noticed by a call that raises WorkerLost (`attempt`) or by whoever watches processes and progress (`watch`).
Then: journal it → its owner does without it (`gone`) → a new process is started → its owner takes it back (`back`). A
worker that is lost again and again at one policy version ends the run, as the loss of the core's trainer does.
"""

from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from gyre.control.base import Cells, EssentialLost, Part, WorkerId, WorkerLost
from gyre.control.shared_state import SharedState
from gyre.control.task_supervisor import TaskSupervisor
from gyre.core.errors import GyreError
from gyre.core.events import ProcessLost, ProcessRestarted

T = TypeVar("T")
CORE = WorkerId("trainer", 0)


class RecoveryLimits(msgspec.Struct, frozen=True, kw_only=True):
    """When recovery gives up."""

    max_failures: int = 3
    """How often one worker may be lost at one policy version."""
    no_engine_s: float = 600.0
    """How long no engine at all may be alive."""


class Owner(Protocol):
    """Who works with workers of one kind."""

    async def gone(self, cell: int) -> None:
        """The worker is lost: go on without it. Returns before its replacement is started."""
        ...

    async def back(self, cell: int, alive: Callable[[], None]) -> None:
        """A new process is there; calls `alive` when the worker counts again. Raises WorkerLost."""
        ...


class Owners(NamedTuple):
    """Who works with the workers of each part."""

    engine: Owner
    trainer: Owner


class Recovery:
    def __init__(self, state: SharedState, cells: Cells, tasks: TaskSupervisor, limits: RecoveryLimits) -> None:
        self._state = state
        self.cells = cells
        """Calls whose failure counts as a loss go through `attempt`."""
        self._tasks = tasks
        self.limits = limits
        self._owners: Owners | None = None
        self._down: set[WorkerId] = set()
        self._incarnations: Counter[WorkerId] = Counter()
        self._losses: Counter[tuple[WorkerId, int]] = Counter()

    def alive(self, part: Part, cell: int) -> bool:
        return not self._down or WorkerId(part, cell) not in self._down

    async def attempt(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a call of `Cells`. Raises WorkerLost when a worker is gone; its replacement is under way then,
        or there already."""
        before = self._incarnations.copy()
        try:
            return await call
        except WorkerLost as error:
            if self._incarnations[error.worker] == before[error.worker]:
                self.lost(error.worker, error.detail)
            raise

    def lost(self, worker: WorkerId, detail: str) -> None:
        """Starts the replacement, unless it is under way. Raises EssentialLost for the core's trainer."""
        if worker not in self._down:
            self._down.add(worker)
            self._record(worker, detail)
            self._state.signal.notify()
            if worker != CORE:
                self._tasks.spawn(self._replace(worker), f"replace {worker}")
        if worker == CORE:
            raise EssentialLost(f"the core's trainer is gone: {detail}")

    def owned_by(self, owners: Owners) -> None:
        """To be called before anything can be lost: owners work with workers that are alive, so they come later."""
        self._owners = owners

    async def watch(self) -> None:
        """Takes the losses that no call has noticed; ends only by cancellation."""
        while True:
            loss = await self.cells.next_failure()
            self.lost(loss.worker, loss.detail)

    async def _replace(self, worker: WorkerId) -> None:
        assert self._owners is not None
        state, owner = self._state, getattr(self._owners, worker.part)
        started = state.clock.now()

        def alive() -> None:
            self._down.discard(worker)
            self._incarnations[worker] += 1
            now = state.clock.now()
            state.record(ProcessRestarted(t=now, name=str(worker), seconds=now - started))
            state.changed()

        await owner.gone(worker.cell)
        while True:
            try:
                await self.cells.replace(worker)
                await owner.back(worker.cell, alive)
                return
            except WorkerLost as error:
                self._record(worker, error.detail)

    def _record(self, worker: WorkerId, detail: str) -> None:
        state = self._state
        state.record(ProcessLost(t=state.clock.now(), name=str(worker), detail=detail))
        losses = self._losses[worker, state.version] = self._losses[worker, state.version] + 1
        if losses > self.limits.max_failures:
            raise GyreError(f"{worker} was lost {losses} times at policy version {state.version}, last: {detail}")
