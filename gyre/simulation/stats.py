"""What a run came to, read from its journal."""

from gyre.core.events import Event, ExecutionClosed, GroupReady, Published, StepDone, TransitionFinished
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
        self._longest: dict[int, float] = {}

    def read(self, event: Event) -> None:
        match event:
            case ExecutionClosed() if event.cause != "cancelled":
                self.executions += 1
                self.waited_hours += event.waited_s / HOUR
                self.execution_hours += event.seconds / HOUR
                self.causes[event.cause] = self.causes.get(event.cause, 0) + 1
                self._longest[event.group] = max(self._longest.get(event.group, 0.0), event.seconds / HOUR)
            case GroupReady():
                longest = self._longest.pop(event.group)
                self.groups += 1
                self.group_hours += longest
                self.long_groups += longest >= 4.0
            case StepDone():
                self.step_ends.append(event.t / HOUR)
                self.staleness.append(event.staleness)
            case Published():
                self.burst_ends.append(event.t / HOUR)
            case TransitionFinished(source="rollout", target="training"):
                self.joins.append((event.cell, event.t / HOUR))
            case _:
                pass
