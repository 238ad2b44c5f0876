"""What every cell did when, from the journal: the data of the cell-role timeline. Pure functions of the events."""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from gyre.core.events import (
    Event,
    ExecutionStarted,
    ExecutionTerminated,
    GroupReady,
    LedgerSampled,
    RunStarted,
    StepDone,
    TransitionFinished,
    TransitionStarted,
)
from gyre.store.journal import SurvivingLine

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
    cells = sorted({cell for event in events for cell in mentioned(event)})
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
        for cell, activity in turns(event, cells):
            turn(cell, activity, event.t)
    for cell in cells:
        close(cell, end)
    return spans


def turns(event: Event, cells: Iterable[int]) -> list[tuple[int, Activity]]:
    """The cells of `cells` that this event puts into another activity, or leaves in theirs."""
    match event:
        case RunStarted():
            return [(cell, "rollout") for cell in cells]
        case TransitionStarted():
            return [(event.cell, "transition")]
        case TransitionFinished():
            return [(event.cell, event.target)]
        case _:
            return []


def mentioned(event: Event) -> range | tuple[int, ...]:
    """The cells that an event tells of."""
    match event:
        case LedgerSampled():
            return range(len(event.roles))
        case TransitionStarted() | TransitionFinished():
            return (event.cell,)
        case _:
            return ()


def waterlevels(events: Iterable[Event]) -> list[Waterlevel]:
    """The ledger at every sample and, between two samples, at every start and end of an execution."""
    levels: list[Waterlevel] = []
    for event in events:
        level = next_level(levels[-1] if levels else None, event)
        if level is not None:
            levels.append(level)
    return levels


def next_level(last: Waterlevel | None, event: Event) -> Waterlevel | None:
    """The ledger after `event`; None when the event does not change it, or nothing is known yet."""
    if isinstance(event, LedgerSampled):
        return Waterlevel(t=event.t, waterlevel=event.d - event.f, capacity=event.capacity, running=event.p - event.f)
    if isinstance(event, ExecutionStarted | ExecutionTerminated) and last is not None:
        started = isinstance(event, ExecutionStarted)
        return Waterlevel(
            t=event.t,
            waterlevel=last.waterlevel - (not started),
            capacity=last.capacity,
            running=last.running + (1 if started else -1),
        )
    return None


def ready_groups(events: Sequence[Event]) -> list[tuple[float, int]]:
    """(seconds, ready groups) at the begin and at every change."""
    line = SurvivingLine()
    curve = [(events[0].t, 0)] if events else []
    for event in events:
        line.read(event)
        if isinstance(event, GroupReady | StepDone | RunStarted):
            curve.append((event.t, len(line.ready)))
    return curve
