"""What every cell did when, from the journal: the data of the cell-role timeline. Pure functions of the events."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from gyre.core.events import (
    Event,
    ExecutionClosed,
    ExecutionStarted,
    LedgerSampled,
    Role,
    RunStarted,
    TransitionFinished,
    TransitionStarted,
)

Activity = Literal["rollout", "training", "transition"]


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A cell in one role, or between two, from `start` to `end` seconds."""

    activity: Activity
    start: float
    end: float


class Waterlevel(msgspec.Struct, frozen=True, kw_only=True):
    t: float
    waterlevel: int
    """w = d − f."""
    capacity: int
    """C_R: executions that the engines may carry."""
    running: int
    """p − f."""


def role_spans(events: Sequence[Event]) -> dict[int, list[Span]]:
    """Spans of every cell, in time order, without gaps; by cell index. Every cell serves rollouts when a run starts.

    `events` are on one axis (`gyre.store.journal.on_one_axis`) and must hold a ledger sample or a transition of each
    cell: a cell that neither mentions is not in the result."""
    cells = sorted({cell for event in events for cell in _mentioned(event)})
    if not cells:
        return {}
    begin, end = events[0].t, max(event.t for event in events)
    spans: dict[int, list[Span]] = {cell: [] for cell in cells}
    now: dict[int, tuple[Activity, float]] = dict.fromkeys(cells, ("rollout", begin))

    def close(cell: int, t: float) -> None:
        activity, since = now[cell]
        if t == since:
            return
        of_cell = spans[cell]
        if of_cell and of_cell[-1].activity == activity:  # what lay between lasted no time
            since = of_cell.pop().start
        of_cell.append(Span(activity=activity, start=since, end=t))

    def turn(cell: int, activity: Activity, t: float) -> None:
        if activity != now[cell][0]:
            close(cell, t)
            now[cell] = (activity, t)

    for event in events:
        match event:
            case RunStarted():
                for cell in cells:
                    turn(cell, "rollout", event.t)
            case TransitionStarted():
                turn(event.cell, "transition", event.t)
            case TransitionFinished():
                turn(event.cell, event.target, event.t)
            case _:
                pass
    for cell in cells:
        close(cell, end)
    return spans


def waterlevels(events: Sequence[Event]) -> list[Waterlevel]:
    """The ledger at every sample and, between two samples, at every start and end of an execution."""
    levels: list[Waterlevel] = []
    for event in events:
        if isinstance(event, LedgerSampled):
            level = Waterlevel(
                t=event.t, waterlevel=event.d - event.f, capacity=event.capacity, running=event.p - event.f
            )
        elif isinstance(event, ExecutionStarted | ExecutionClosed) and levels:
            started = isinstance(event, ExecutionStarted)
            last = levels[-1]
            level = Waterlevel(
                t=event.t,
                waterlevel=last.waterlevel - (not started),
                capacity=last.capacity,
                running=last.running + (1 if started else -1),
            )
        else:
            continue
        levels.append(level)
    return levels


def seconds_by_role(spans: dict[int, list[Span]]) -> dict[int, dict[Role, float]]:
    """Seconds that each cell spent in each role; transitions count in neither."""
    roles: tuple[Role, ...] = ("rollout", "training")
    return {
        cell: {role: sum(span.end - span.start for span in of_cell if span.activity == role) for role in roles}
        for cell, of_cell in spans.items()
    }


def _mentioned(event: Event) -> range | tuple[int, ...]:
    match event:
        case LedgerSampled():
            return range(len(event.roles))
        case TransitionStarted() | TransitionFinished():
            return (event.cell,)
        case _:
            return ()
