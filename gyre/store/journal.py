"""Reading a journal that a run and its resumptions wrote one after the other.

A resumption starts with `RunStarted(resumed_from=v)`: it goes on from the checkpoint of version v, so what the parts
before it did beyond v is history and not part of the surviving line. Pure functions of the events.
"""

from collections.abc import Iterable

import msgspec

from gyre.core.events import (
    CellJoined,
    CellLeft,
    CheckpointSaved,
    Event,
    LogprobGapGrew,
    MicroStepDone,
    MicroStepsReturned,
    PublicationProbed,
    Published,
    RunStarted,
    StepDone,
)


def on_one_axis(events: Iterable[Event]) -> list[Event]:
    """The events with times that never restart: a part whose clock began again goes on where the last one ended."""
    shifted: list[Event] = []
    offset = latest = 0.0
    for event in events:
        if isinstance(event, RunStarted):
            offset = max(0.0, latest - event.t)
        moved = msgspec.structs.replace(event, t=event.t + offset) if offset else event
        latest = max(latest, moved.t)
        shifted.append(moved)
    return shifted


def surviving(events: Iterable[Event]) -> list[Event]:
    """Without the steps, micro-steps, joins and publications that a resumption went back behind."""
    line: list[Event] = []
    for event in events:
        if isinstance(event, RunStarted) and line:
            resumed_from = event.resumed_from or 0
            line = [earlier for earlier in line if _version(earlier) <= resumed_from]
        line.append(event)
    return line


def _version(event: Event) -> int:
    """The policy version that must survive for the event to count; work on step s counts with version s."""
    match event:
        case (
            StepDone(step=step)
            | LogprobGapGrew(step=step)
            | MicroStepDone(step=step)
            | MicroStepsReturned(step=step)
            | CellJoined(step=step)
            | CellLeft(step=step)
        ):
            return step
        case Published(version=version) | PublicationProbed(version=version) | CheckpointSaved(version=version):
            return version
        case _:
            return 0
