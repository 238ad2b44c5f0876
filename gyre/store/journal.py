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
    GroupDispatched,
    GroupReady,
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


def went_back(event: Event) -> int | None:
    """The version that a resumption goes on from: what was done beyond it is discarded. None for any other event."""
    return event.resumed_from or 0 if isinstance(event, RunStarted) else None


def surviving(events: Iterable[Event]) -> list[Event]:
    """Without the steps, micro-steps, joins and publications that a resumption went back behind."""
    line: list[Event] = []
    for event in events:
        base = went_back(event)
        if base is not None:
            line = [earlier for earlier in line if _version(earlier) <= base]
        line.append(event)
    return line


class SurvivingLine:
    """What the events so far come to on the line of checkpoints that survives. Give it every event once, in order.

    Every reader that needs to know what a resumption discards asks here. A group that was dispatched later than the
    version that a resumption goes on from is dropped, because a discarded line of weights produced it; one that a later
    step consumed is unconsumed again.
    """

    def __init__(self) -> None:
        self.version = 0
        """Steps taken."""
        self.published = 0
        self.went_back_to: list[int] = []
        """The version of each resumption, oldest first."""
        self.dispatched: dict[int, tuple[GroupDispatched, int]] = {}
        """Group → its dispatch, and how many resumptions came before that."""
        self.ready: set[int] = set()
        """Groups that are ready and not consumed."""
        self.consumed: dict[int, int] = {}
        """Group → the step that consumed it."""

    def read(self, event: Event) -> None:
        match event:
            case RunStarted():
                if event.resumed_from is not None:
                    self.went_back_to.append(event.resumed_from)
                self.go_back(event.resumed_from or 0)
            case GroupDispatched():
                self.dispatched[event.group] = (event, len(self.went_back_to))
            case GroupReady():
                self.ready.add(event.group)
            case StepDone():
                self.version = event.step
                self.ready.difference_update(event.groups)
                self.consumed.update(dict.fromkeys(event.groups, event.step))
            case Published():
                self.published = event.version
            case _:
                pass

    def go_back(self, version: int) -> None:
        """The run goes on from the checkpoint of `version`."""
        self.version = self.published = version
        again = [group for group, step in self.consumed.items() if step > version]
        for group in again:
            del self.consumed[group]
        self.ready.update(again)
        for group in [group for group, (event, _) in self.dispatched.items() if event.version > version]:
            del self.dispatched[group]
            self.ready.discard(group)


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
