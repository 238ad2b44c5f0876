"""A second simulator, written from docs/scheduling.md alone: one plain event loop, no asyncio, no Gyre code."""

import heapq
import itertools
from collections import deque


class Reference:
    """`row`: mode, streaming, phi, mu, K, C_e, C_s, nodes (per cell). Times in seconds."""

    def __init__(
        self,
        dur,
        work,
        steps,
        *,
        mode,
        streaming,
        extra_dispatch,
        steps_per_burst,
        cells,
        cell_capacity,
        pool_capacity,
        nodes,
        groups_per_step,
        **times,
    ):
        self.dur, self.work, self.steps = dur, work, steps
        self.fixed, self.streaming, self.steps_per_burst = mode == "async", streaming, steps_per_burst
        (
            self.cells,
            self.cell_capacity,
            self.pool_capacity,
            self.nodes,
            self.groups_per_step,
            self.executions_per_group,
        ) = cells, cell_capacity, pool_capacity, nodes, groups_per_step, len(dur[0])
        self.tau, self.rho = times.get("tau", 60.0), times.get("rho", 0.125)
        self.publication, self.parts = times.get("publication", 60.0), times.get("parts", 4)
        self.grading, self.graders = times.get("grading", 0.0), times.get("graders")
        self.graded_at_once, self.ungraded = 0, deque()
        self.r2t, self.t2r = times.get("r2t", 8.52), times.get("t2r", 3.46)
        self.depth = round((extra_dispatch + steps_per_burst) * groups_per_step)
        self.now, self.sequence, self.heap = 0.0, itertools.count(), []
        self.queue, self.running, self.open_members = deque(), 0, {}
        self.version_of, self.ready, self.next_group = {}, [], 0
        self.version = self.published = 0
        self.outstanding = 0
        self.k = cells if self.fixed else 0
        self.members = self.k
        self.moving = False
        self.idle = deque(range(self.members))
        self.tasks, self.busy, self.taken, self.needed = deque(), 0, [], 0
        self.open, self.first, self.over = False, True, False
        self.supply_since = None
        self.out = {"steps": [], "bursts": [], "joins": [], "staleness": []}

    def at(self, delay, action):
        heapq.heappush(self.heap, (self.now + delay, next(self.sequence), action))

    def run(self):
        self.dispatch(self.depth)
        self.open_batch(first=True)
        while len(self.out["bursts"]) < -(-self.steps // self.steps_per_burst):
            self.settle()
            self.now, _, action = heapq.heappop(self.heap)
            action()
        return self.out

    def dispatch(self, count):
        for group in range(self.next_group, self.next_group + count):
            self.version_of[group], self.open_members[group] = self.published, self.executions_per_group
            self.queue.extend((group, member) for member in range(self.executions_per_group))
            self.outstanding += self.executions_per_group
        self.next_group += count

    def capacity(self):
        return self.pool_capacity + (0 if self.fixed else (self.cells - self.k) * self.cell_capacity)

    def supply(self):
        return min(len(self.ready), self.needed) >= self.rho * self.groups_per_step

    def settle(self):
        """Everything that the rules make happen at this instant."""
        while True:
            while self.queue and self.running < self.capacity():
                group, member = self.queue.popleft()
                self.running += 1
                hours = self.dur[group % len(self.dur)][member]
                self.at(hours * 3600.0, lambda group=group: self.terminate(group))
            if not self.supply():
                self.supply_since = None
            elif self.supply_since is None:
                self.supply_since = self.now
                self.at(self.tau, lambda: None)
            if self.feed():
                continue
            if not self.may_join():
                return
            self.join()

    def may_join(self):
        if self.fixed or self.moving or self.over or self.k == self.cells or self.supply_since is None:
            return False
        if self.outstanding > self.capacity() - self.cell_capacity:
            return False
        return self.now >= self.supply_since + self.tau

    def join(self):
        cell, self.moving = self.k, True
        self.k += 1
        self.at(self.r2t, lambda: self.joined(cell))

    def joined(self, cell):
        if self.over:
            self.at(self.t2r, self.arrived_late)
            return
        self.moving = False
        self.members += 1
        self.idle.append(cell)
        self.out["joins"].append((cell, self.now))
        self.restart_timer()

    def arrived_late(self):
        self.moving = False
        self.after_last_update()

    def restart_timer(self):
        self.supply_since = self.now if self.supply() else None
        self.at(self.tau, lambda: None)

    def terminate(self, group):
        self.running -= 1
        self.outstanding -= 1
        if self.grading == 0:
            self.graded(group)
            return
        self.ungraded.append(group)
        self.grade()

    def grade(self):
        while self.ungraded and (self.graders is None or self.graded_at_once < self.graders):
            self.graded_at_once += 1
            self.at(self.grading, lambda group=self.ungraded.popleft(): self.leaves_grader(group))

    def leaves_grader(self, group):
        self.graded_at_once -= 1
        self.grade()
        self.graded(group)

    def graded(self, group):
        self.open_members[group] -= 1
        if self.open_members[group] == 0:
            self.ready.append(group)

    def open_batch(self, first):
        self.first, self.open, self.needed, self.taken = first, True, self.groups_per_step, []
        self.restart_timer()

    def feed(self):
        """Claims, then one more group if a cell still waits; True when something happened."""
        happened = False
        while self.open and self.tasks and self.idle:
            cell, seconds = self.idle.popleft(), self.tasks.popleft()
            self.busy += 1
            self.at(seconds, lambda cell=cell: self.finished(cell))
            happened = True
        burst = min(self.steps_per_burst, self.steps - len(self.out["bursts"]) * self.steps_per_burst)
        gate = self.streaming or not self.first or self.taken or len(self.ready) >= burst * self.groups_per_step
        if self.open and self.idle and not self.tasks and self.needed and self.ready and gate:
            group = min(self.ready)
            self.ready.remove(group)
            self.needed -= 1
            self.taken.append(group)
            work = self.work[group % len(self.work)] * 3600.0
            self.tasks.extend([work / self.parts / self.nodes] * (self.parts if work else 0))
            happened = True
        if self.open and not self.needed and not self.tasks and not self.busy and not happened:
            self.update()
            happened = True
        return happened

    def finished(self, cell):
        self.busy -= 1
        self.idle.append(cell)

    def update(self):
        self.out["staleness"].append([self.version - self.version_of[group] for group in self.taken])
        self.version += 1
        self.out["steps"].append(self.now)
        self.open = False
        if self.version % self.steps_per_burst and self.version < self.steps:
            self.open_batch(first=False)
            return
        self.over = True
        if not self.moving:
            self.after_last_update()

    def after_last_update(self):
        satellites = 0 if self.fixed else self.members - 1
        self.at(self.t2r if satellites > 0 else 0.0, lambda: self.at(self.publication, self.publish))

    def publish(self):
        self.published = self.version
        self.out["bursts"].append(self.now)
        self.over = False
        if not self.fixed:
            self.members = self.k = 1
            self.idle = deque([0])
            stays = len(self.ready) >= self.rho * self.groups_per_step
            stays &= (
                self.outstanding + self.steps_per_burst * self.executions_per_group * self.groups_per_step
                <= self.pool_capacity + (self.cells - 1) * self.cell_capacity
            )
            if not stays:
                self.members, self.idle, self.moving = 0, deque(), True
                self.at(self.t2r, self.core_back)
        self.dispatch(self.steps_per_burst * self.groups_per_step)
        self.open_batch(first=True)

    def core_back(self):
        self.k, self.moving = 0, False
        self.restart_timer()
