"""Reading a journal that a run and its resumptions wrote one after the other.

A run goes back in two ways. A resumption starts with `RunStarted(resumed_from=v)`; it says how many executions outlived
the controller before. After the
loss of the core's trainer, `RunWentBack(version=v)` stands inside a part, and executions go on. Either way the run goes
on from the checkpoint of version v, so what was done beyond v is history and not part of the surviving line. Pure
functions of the events.
"""

from collections.abc import Iterable

import msgspec

from gyre.core.events import (
    CellJoined,
    CellLeft,
    CheckpointSaved,
    Event,
    ExecutionClosed,
    ExecutionStarted,
    ExecutionTerminated,
    GroupDispatched,
    GroupReady,
    LogprobGapGrew,
    MicroStepDone,
    MicroStepsReturned,
    PublicationProbed,
    Published,
    RunStarted,
    RunWentBack,
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
    """The version that the run goes on from: what was done beyond it is discarded. None for any other event."""
    match event:
        case RunStarted():
            return event.resumed_from or 0
        case RunWentBack():
            return event.version
        case _:
            return None


def surviving(events: Iterable[Event]) -> list[Event]:
    """Without the steps, micro-steps, joins and publications that the run went back behind."""
    line: list[Event] = []
    for event in events:
        base = went_back(event)
        if base is not None:
            line = [earlier for earlier in line if _version(earlier) <= base]
        line.append(event)
    return line


class SurvivingLine:
    """What the events so far come to on the line of checkpoints that survives. Give it every event once, in order.

    Every reader that needs to know what going back discards asks here. Groups stay: one that was dispatched under a
    later version than the run goes on from has that version from then on, and one that a later step consumed is
    unconsumed again. `scheduling.ledger.Ledger.go_back` does the same to the groups of a running controller.
    """

    def __init__(self) -> None:
        self.version = 0
        """Steps taken."""
        self.published = 0
        self.went_back_to: list[int] = []
        """The version of each time that the run went back, oldest first."""
        self.dispatched: dict[int, GroupDispatched] = {}
        """Group → its dispatch, under the version that counts."""
        self.ready: set[int] = set()
        """Groups that are ready and not consumed."""
        self.consumed: dict[int, int] = {}
        """Group → the step that consumed it."""
        self.open: dict[str, bool] = {}
        """Executions that were started, did not close, and may live on: whether their harness has ended."""

    def read(self, event: Event) -> None:
        match event:
            case RunStarted():
                if not event.outlived:
                    self.open.clear()
                if event.resumed_from is not None:
                    self.go_back(event.resumed_from)
            case RunWentBack():
                self.go_back(event.version)
            case ExecutionStarted():
                self.open[event.execution_id] = False
            case ExecutionTerminated():
                self.open[event.execution_id] = True
            case ExecutionClosed():
                self.open.pop(event.execution_id, None)
            case GroupDispatched():
                self.dispatched[event.group] = event
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
        self.went_back_to.append(version)
        self.version = self.published = version
        again = [group for group, step in self.consumed.items() if step > version]
        for group in again:
            del self.consumed[group]
        self.ready.update(again)
        for group, event in self.dispatched.items():
            if event.version > version:
                self.dispatched[group] = msgspec.structs.replace(event, version=version)


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
