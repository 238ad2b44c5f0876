"""What a run starts from, what it looks like from outside, and how a journal becomes the first again.

`ControlState` is all that a resumed controller needs: the version of the checkpoint and the groups that were dispatched
and are not consumed by it. `resume_state` rebuilds it from the journal; it is pure.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gyre.core.errors import ConfigError
from gyre.core.events import Event, Role
from gyre.core.records import Outcome
from gyre.store.journal import SurvivingLine


class Outlived(msgspec.Struct, frozen=True):
    execution_id: str
    terminated: bool
    """Its harness has ended; the grade is awaited."""


class PendingGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Dispatched at `version`, not consumed."""

    group: int
    query: str
    version: int
    outcomes: dict[int, Outcome]
    """By member, for the executions that are closed."""
    outlived: dict[int, Outlived] = {}
    """By member, the executions that outlived the controller before."""


class ControlState(msgspec.Struct, frozen=True, kw_only=True):
    version: int = 0
    """Policy version of the checkpoint (= steps taken = published version)."""
    went_back_to: list[int] = []
    """The version of each time that the run went back to a checkpoint, the last one last."""
    next_group: int = 0
    pending: list[PendingGroup] = []

    @property
    def outlived(self) -> int:
        """Executions that outlived the controller before."""
        return sum(len(group.outlived) for group in self.pending)

    @property
    def incarnation(self) -> int:
        """How often the run went back; executions launched by incarnation r > 0 are named g12-3.r1."""
        return len(self.went_back_to)


FRESH = ControlState()


class ControlView(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot for progress displays."""

    time: float
    step: int
    """Steps taken."""
    max_steps: int
    version: int
    published: int
    phase: str
    """What the training side is doing or waiting for, in words."""
    queued: int
    running: int
    grading: int = 0
    """Terminated executions whose grade is not known yet: they wait for a grader, or have one."""
    closed: int
    waterlevel: int
    capacity: int
    ready_groups: int
    roles: list[Role]
    """[K]"""
    training_cells: int
    """Cells registered for the current batch."""
    batch_groups_taken: int
    batch_groups_done: int
    batch_groups: int
    """B."""
    reward_mean: float | None
    """Of the last step."""


def execution_id(group: int, member: int, incarnation: int) -> str:
    return f"g{group}-{member}" + (f".r{incarnation}" if incarnation else "")


def parse_execution_id(name: str) -> tuple[int, int, int]:
    """(group, member, incarnation); raises ConfigError for a name that Gyre did not give."""
    try:
        body, _, suffix = name.partition(".r")
        group, _, member = body.removeprefix("g").partition("-")
        return int(group), int(member), int(suffix or 0)
    except ValueError:
        raise ConfigError(f"{name!r} is not an execution id; expected g<group>-<member>[.r<incarnation>].") from None


def newest_surviving(execution_id: str, went_back_to: Sequence[int]) -> int | None:
    """What the execution sampled at a later version may come from weights that are gone; None when all are there."""
    *_, born = parse_execution_id(execution_id)
    return min(went_back_to[born:], default=None)


def resume_state(
    events: Iterable[Event], outcomes: Mapping[str, Outcome], version: int, *, outlived: bool = False
) -> ControlState:
    """The state at the checkpoint of `version` (a burst boundary), seen from the end of the journal.

    `SurvivingLine` says which groups are unconsumed again, and their versions. Executions that closed later are kept,
    whoever sampled them (`newest_surviving`); outcomes of those that were cut off (cause "cancelled") count as none.
    A journal may hold several incarnations. `outlived`: the processes that hold executions outlived the controller, so
    executions that did not close are running.
    """
    line = SurvivingLine()
    for event in events:
        line.read(event)
    line.go_back(version)
    live: dict[int, dict[int, Outlived]] = {}
    for name, terminated in line.open.items() if outlived else ():
        group, member, _ = parse_execution_id(name)
        live.setdefault(group, {})[member] = Outlived(name, terminated)
    known: dict[int, dict[int, Outcome]] = {}
    for name, outcome in outcomes.items():
        group, member, _ = parse_execution_id(name)
        # One that has an outcome and did not close in the journal closes once more.
        if outcome.cause != "cancelled" and member not in live.get(group, {}):
            known.setdefault(group, {})[member] = outcome
    pending = [
        PendingGroup(
            group=group,
            query=event.query,
            version=event.version,
            outcomes=known.get(group, {}),
            outlived=live.get(group, {}),
        )
        for group, event in sorted(line.dispatched.items())
        if group not in line.consumed
    ]
    return ControlState(
        version=version,
        went_back_to=line.went_back_to,
        next_group=max(line.dispatched, default=-1) + 1,
        pending=pending,
    )
