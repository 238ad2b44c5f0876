"""What a run came to, read from its journal."""

from gyre.core.events import (
    CellJoined,
    CellLeft,
    Event,
    ExecutionClosed,
    GroupReady,
    MicroStepDone,
    Published,
    StepDone,
    TransitionFinished,
)
from gyre.simulation.workload import HOUR


class RunStats:
    """Reader of a simulated journal. Times are hours."""

    def __init__(self) -> None:
        self.step_ends: list[float] = []
        self.burst_ends: list[float] = []
        self.joins: list[tuple[int, float]] = []
        self.staleness: list[list[int]] = []
        self.executions = 0
        self.execution_hours = 0.0
        self.waited_hours = 0.0
        """For a grader, over all executions."""
        self.causes: dict[str, int] = {}
        self.groups = 0
        self.group_hours = 0.0
        """Sum of the longest execution of each ready group."""
        self.long_groups = 0
        """Groups whose longest execution took at least four hours."""
        self.lost_groups = 0
        """Groups of which an execution took its whole budget without a valid evaluation."""
        self.training_hours = 0.0
        """In which cells were in the training role, summed over them, up to the last update."""
        self.busy_hours = 0.0
        """Of them, in which they processed micro-steps."""
        self._longest: dict[int, float] = {}
        self._lost: set[int] = set()
        self._joined: dict[int, float] = {}

    def read(self, event: Event) -> None:
        match event:
            case ExecutionClosed() if event.cause != "cancelled":
                self.executions += 1
                self.waited_hours += event.waited_s / HOUR
                self.execution_hours += event.seconds / HOUR
                self.causes[event.cause] = self.causes.get(event.cause, 0) + 1
                self._longest[event.group] = max(self._longest.get(event.group, 0.0), event.seconds / HOUR)
                if event.cause == "overall_timeout":
                    self._lost.add(event.group)
            case GroupReady():
                self.lost_groups += event.group in self._lost
                longest = self._longest.pop(event.group)
                self.groups += 1
                self.group_hours += longest
                self.long_groups += longest >= 4.0
            case MicroStepDone():
                self.busy_hours += event.seconds / HOUR
            case CellJoined():
                self._joined[event.cell] = event.t / HOUR
            case CellLeft():
                self.training_hours += event.t / HOUR - self._joined.pop(event.cell)
            case StepDone():
                # Whoever trains now has trained up to here.
                for cell, since in self._joined.items():
                    self.training_hours += event.t / HOUR - since
                    self._joined[cell] = event.t / HOUR
                self.step_ends.append(event.t / HOUR)
                self.staleness.append(event.staleness)
            case Published():
                self.burst_ends.append(event.t / HOUR)
            case TransitionFinished(source="rollout", target="training"):
                self.joins.append((event.cell, event.t / HOUR))
            case _:
                pass
