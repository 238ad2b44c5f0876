"""Who is alive, and the one way in which Gyre deals with a member that is gone, whatever it was and whoever noticed.

A loss is noticed by a call that raises MemberLost (`attempt`) or by whoever watches processes and progress (`watch`).
Then: journal it → its owner does without it (`gone`) → a new process is started → its owner takes it back (`back`). A
member that is lost again and again at one policy version ends the run, as the loss of the core's trainer does.
"""

from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from gyre.control.base import Cells, EssentialLost, Member, MemberLost, Part
from gyre.control.board import Board
from gyre.control.crew import Crew
from gyre.core.errors import GyreError
from gyre.core.events import ProcessLost, ProcessRestarted

T = TypeVar("T")
CORE = Member("trainer", 0)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """When recovery gives up."""

    losses: int = 3
    """How often one member may be lost at one policy version."""
    no_engine_s: float = 600.0
    """How long no engine at all may be alive."""


class Owner(Protocol):
    """Who works with members of one kind."""

    async def gone(self, cell: int) -> None:
        """The member is lost: go on without it. Returns before its replacement is started."""
        ...

    async def back(self, cell: int, alive: Callable[[], None]) -> None:
        """A new process is there; calls `alive` when the member counts again. Raises MemberLost."""
        ...


class Owners(NamedTuple):
    """Who works with the members of each part."""

    engine: Owner
    trainer: Owner


class Members:
    def __init__(self, board: Board, cells: Cells, crew: Crew, limits: Limits) -> None:
        self._board = board
        self.cells = cells
        """Calls whose failure counts as a loss go through `attempt`."""
        self._crew = crew
        self.limits = limits
        self._owners: Owners | None = None
        self._down: set[Member] = set()
        self._incarnations: Counter[Member] = Counter()
        self._losses: Counter[tuple[Member, int]] = Counter()

    def alive(self, part: Part, cell: int) -> bool:
        return Member(part, cell) not in self._down

    async def attempt(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a call of `Cells`. Raises MemberLost when a member is gone; its replacement is under way then,
        or there already."""
        before = self._incarnations.copy()
        try:
            return await call
        except MemberLost as error:
            if self._incarnations[error.member] == before[error.member]:
                self.lost(error.member, error.detail)
            raise

    def lost(self, member: Member, detail: str) -> None:
        """Starts the replacement, unless it is under way. Raises EssentialLost for the core's trainer."""
        if member not in self._down:
            self._down.add(member)
            self._record(member, detail)
            self._board.signal.notify()
            if member != CORE:
                self._crew.spawn(self._replace(member), f"replace {member}")
        if member == CORE:
            raise EssentialLost(f"the core's trainer is gone: {detail}")

    def owned_by(self, owners: Owners) -> None:
        """To be called before anything can be lost: owners work with members that are alive, so they come later."""
        self._owners = owners

    async def watch(self) -> None:
        """Takes the losses that no call has noticed; ends only by cancellation."""
        while True:
            loss = await self.cells.next_loss()
            self.lost(loss.member, loss.detail)

    async def _replace(self, member: Member) -> None:
        assert self._owners is not None
        board, owner = self._board, getattr(self._owners, member.part)
        started = board.clock.now()

        def alive() -> None:
            self._down.discard(member)
            self._incarnations[member] += 1
            now = board.clock.now()
            board.record(ProcessRestarted(t=now, name=str(member), seconds=now - started))
            board.changed()

        await owner.gone(member.cell)
        while True:
            try:
                await self.cells.replace(member)
                await owner.back(member.cell, alive)
                return
            except MemberLost as error:
                self._record(member, error.detail)

    def _record(self, member: Member, detail: str) -> None:
        board = self._board
        board.record(ProcessLost(t=board.clock.now(), name=str(member), detail=detail))
        losses = self._losses[member, board.version] = self._losses[member, board.version] + 1
        if losses > self.limits.losses:
            raise GyreError(f"{member} was lost {losses} times at policy version {board.version}, last: {detail}")
