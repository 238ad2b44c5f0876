"""The capacity ledger: d, p, f and the groups they belong to (paper §4.2).

d counts dispatched executions, p launched ones, f terminated ones; 0 ≤ f ≤ p ≤ d always and p − f ≤ C_R. An execution
terminates when its harness has ended: from then on it holds no place. Its group is ready when the grades of all members
are there. Memory holds what is outstanding, and what a batch took until a checkpoint covers it. Not thread-safe, no
clock, no I/O.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Mapping

import msgspec

from gyre.core.errors import InvariantViolation
from gyre.core.records import Outcome


class Group(msgspec.Struct, kw_only=True):
    """An outstanding group. `outcomes` is [N] by member, None while open."""

    group: int
    query: str
    version: int
    """v_d."""
    outcomes: list[Outcome | None]
    open: int
    """Recovery without an outcome."""
    seconds: float = 0.0
    """Summed over its terminated group_size, from launch to termination; those of before a resume count as none."""

    def closed(self) -> list[Outcome]:
        """[N]; only for a ready group."""
        return [outcome for outcome in self.outcomes if outcome is not None]


class Ledger:
    def __init__(self, group_size: int, lightest_first: bool = False) -> None:
        """`lightest_first`: `take` prefers, among ready groups of one version, the one whose executions took least."""
        self.group_size = group_size
        """N."""
        self._lightest_first = lightest_first
        self.d = 0
        self.p = 0
        self.f = 0
        self.groups: dict[int, Group] = {}
        """Dispatched and not yet taken by a batch."""
        self._taken: dict[int, tuple[Group, int | None]] = {}
        """Groups that a batch took and no checkpoint covers, with the step that consumed them."""
        self._queue: deque[tuple[int, int]] = deque()
        self._running: set[tuple[int, int]] = set()
        self._grading: set[tuple[int, int]] = set()
        self._ready: list[tuple[int, float, int]] = []

    @property
    def waterlevel(self) -> int:
        return self.d - self.f

    @property
    def queued(self) -> int:
        return self.d - self.p

    @property
    def running(self) -> int:
        return self.p - self.f

    @property
    def grading(self) -> int:
        """Terminated executions without an outcome."""
        return len(self._grading)

    @property
    def ready(self) -> int:
        """Ready groups that no batch has taken."""
        return len(self._ready)

    def dispatch(self, group: int, query: str, version: int, known: Mapping[int, Outcome] | None = None) -> None:
        """Queues the N executions of a group; members with a known outcome (a resumed run) count as terminated."""
        if group in self.groups:
            raise InvariantViolation(f"Group {group} was dispatched twice; dispatch numbers must be new.")
        outcomes = [(known or {}).get(member) for member in range(self.group_size)]
        pending = [member for member in range(self.group_size) if outcomes[member] is None]
        self.d += self.group_size
        self.p += self.group_size - len(pending)
        self.f += self.group_size - len(pending)
        self.groups[group] = Group(group=group, query=query, version=version, outcomes=outcomes, open=len(pending))
        self._queue.extend((group, member) for member in pending)
        if not pending:
            self._is_ready(self.groups[group])

    def launch(self) -> tuple[Group, int]:
        """The next queued execution (group, member), now running."""
        group, member = self._queue.popleft()
        self.p += 1
        self._running.add((group, member))
        return self.groups[group], member

    def adopt(self, group: int, member: int, *, terminated: bool) -> None:
        """A queued execution runs already, or is being graded: it outlived the controller before."""
        self._queue.remove((group, member))
        self.p += 1
        self.f += terminated
        (self._grading if terminated else self._running).add((group, member))

    def terminate(self, group: int, member: int, seconds: float = 0.0) -> None:
        """Counts the termination of a launched execution whose harness took `seconds`; its grade is awaited."""
        if (group, member) not in self._running:
            raise InvariantViolation(f"Execution {member} of group {group} terminated but was not running.")
        self._running.remove((group, member))
        self._grading.add((group, member))
        self.f += 1
        self.groups[group].seconds += seconds

    def close(self, group: int, member: int, outcome: Outcome) -> bool:
        """Takes the outcome of a terminated execution; True when its group became ready."""
        self._graded(group, member)
        entry = self.groups[group]
        entry.outcomes[member] = outcome
        entry.open -= 1
        if entry.open == 0:
            self._is_ready(entry)
            return True
        return False

    def cancel(self, group: int, member: int) -> None:
        """Forgets a terminated execution that the end of the run cut off; its group never becomes ready."""
        self._graded(group, member)

    def take(self) -> Group:
        """Hands the ready group of the oldest version (then the lightest, if asked for; then of the lowest dispatch
        number) to a batch."""
        _, _, number = heapq.heappop(self._ready)
        group = self.groups.pop(number)
        self._taken[number] = group, None
        return group

    def consume(self, groups: Iterable[int], step: int) -> None:
        """These groups of the batch are trained by `step`."""
        for number in groups:
            self._taken[number] = self._taken[number][0], step

    def cover(self, version: int) -> None:
        """No way leads back behind this version any more."""
        self._taken = {
            number: (group, step) for number, (group, step) in self._taken.items() if step is None or step > version
        }

    def go_back(self, version: int) -> tuple[list[int], list[int]]:
        """The run goes on from the checkpoint of `version`. Groups that a later step or an open batch took are ready
        again; groups that were dispatched under a later version get this one. Returns the numbers of both, ascending.
        """
        again = [group for group, step in self._taken.values() if step is None or step > version]
        for group in again:
            del self._taken[group.group]
            self.groups[group.group] = group
        relabelled = [group for group in self.groups.values() if group.version > version]
        for group in relabelled:
            group.version = version
        self._ready = []
        for group in self.groups.values():
            if group.open == 0:
                self._is_ready(group)
        return sorted(group.group for group in again), sorted(group.group for group in relabelled)

    def check(self, capacity: int) -> None:
        """Raises InvariantViolation unless 0 ≤ f ≤ p ≤ d and p − f ≤ C_R and p − f executions run. How many are being
        graded is bounded by nothing here: they hold no place."""
        if not 0 <= self.f <= self.p <= self.d:
            raise InvariantViolation(f"Counters out of order: f = {self.f}, p = {self.p}, d = {self.d}.")
        if self.running > capacity:
            raise InvariantViolation(f"{self.running} executions run on a rollout capacity of {capacity}.")
        if self.running != len(self._running):
            raise InvariantViolation(f"p − f = {self.running} but {len(self._running)} executions run.")

    def ages(self, published: int) -> Iterable[int]:
        """published − v_d of every outstanding group."""
        return (published - group.version for group in self.groups.values())

    def _graded(self, group: int, member: int) -> None:
        if (group, member) not in self._grading:
            raise InvariantViolation(f"Execution {member} of group {group} is closed but no grade of it is awaited.")
        self._grading.remove((group, member))

    def _is_ready(self, entry: Group) -> None:
        weight = entry.seconds if self._lightest_first else 0.0
        heapq.heappush(self._ready, (entry.version, weight, entry.group))


class BurstGuard:
    """Inside a burst of boundary dispatch d is constant, w never rises, and the training set is a growing prefix."""

    def __init__(self, ledger: Ledger, training: int) -> None:
        self._d = ledger.d
        self._w = ledger.waterlevel
        self._k = training

    def check(self, ledger: Ledger, training: int) -> None:
        """Raises InvariantViolation when one of the three is broken since the last check."""
        if ledger.d != self._d:
            raise InvariantViolation(f"d changed inside a burst from {self._d} to {ledger.d}.")
        if ledger.waterlevel > self._w:
            raise InvariantViolation(f"The waterlevel rose inside a burst from {self._w} to {ledger.waterlevel}.")
        if training < self._k:
            raise InvariantViolation(f"The training set shrank inside a burst from {self._k} to {training} cells.")
        self._w = ledger.waterlevel
        self._k = training
