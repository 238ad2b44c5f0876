"""A world of random latencies and failures around the real controller, and an independent reading of its journal."""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from gyre.control.base import Environment, ProcessFailure, Publication, Ticket, WorkerId, WorkerLost
from gyre.control.controller import Controller
from gyre.control.recovery import CORE
from gyre.control.setbacks import RecoverySection
from gyre.control.state import FRESH, ControlState, ControlView, resume_state
from gyre.core import events as ev
from gyre.core.errors import GroupBroken
from gyre.core.records import Outcome, Validity
from gyre.scheduling.config import SchedulerConfig, capacity
from gyre.simulation.clock import VirtualClock, run_virtual
from gyre.simulation.synthetic import CellTimes, SimCells, SimMaterializer

T = TypeVar("T")

LOSSES = 3
"""How often a member dies at one version at most, so that a run comes to its end."""

CAUSES = [
    ("completed", Validity.VALID),
    ("harness_timeout", Validity.VALID),
    ("overall_timeout", Validity.UNRESOLVED),
    ("boot_failed", Validity.NO_WORK),
]


class RandomQueries:
    def query(self, group: int) -> str:
        return f"q{group % 7}"


class RandomExecutions:
    def __init__(self, seed: int, longest: float = 100.0, graded: float = 0.0) -> None:
        """`graded`: share of the executions whose grade comes some time after their end."""
        self._graded = graded
        self._random = random.Random(seed)
        self._longest = longest
        self.started: list[Ticket] = []
        self.outcomes: dict[str, Outcome] = {}

    def harness(self, ticket: Ticket) -> str:
        return "random"

    async def run(self, ticket: Ticket, terminated: Callable[[], None]) -> Outcome:
        self.started.append(ticket)
        # Many ties: integers, and sometimes nothing at all.
        await asyncio.sleep(self._random.choice([0, 1, 2, self._random.uniform(0, self._longest)]))
        if self._graded and self._random.random() < self._graded:
            terminated()
            await asyncio.sleep(self._random.choice([0, 1, self._random.uniform(0, self._longest)]))
        cause, validity = self._random.choice(CAUSES)
        outcome = Outcome(execution_id=ticket.execution_id, validity=validity, reward=0.5, cause=cause)
        self.outcomes[ticket.execution_id] = outcome
        return outcome


class HeldExecutions(RandomExecutions):
    """They outlive the controller: one that asks again finds them."""

    def __init__(self, seed: int, graded: float) -> None:
        super().__init__(seed, graded=graded)
        self._held: dict[str, tuple[asyncio.Task[Outcome], asyncio.Event]] = {}

    async def run(self, ticket: Ticket, terminated: Callable[[], None]) -> Outcome:
        if ticket.execution_id not in self._held:
            ended = asyncio.Event()
            self._held[ticket.execution_id] = asyncio.ensure_future(super().run(ticket, ended.set)), ended
        task, ended = self._held[ticket.execution_id]
        waiting = asyncio.ensure_future(ended.wait())
        try:
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if not task.done():
            terminated()
        return await asyncio.shield(task)


class RandomCells(SimCells):
    """Every call takes a random time. With `failure` > 0, any member may be lost: at a call, in a reduction, with a
    publication, in a checkpoint, or while nobody calls it (then it is reported); the core's trainer only if
    `core_dies`."""

    def __init__(self, seed: int, version: int, failure: float = 0.0, core_dies: bool = False) -> None:
        super().__init__(VirtualClock(), CellTimes(), nodes=1, version=version)
        self._random = random.Random(seed)
        self._failure = failure
        self._core_dies = core_dies
        self._dead: set[WorkerId] = set()
        self._losses: asyncio.Queue[ProcessFailure] = asyncio.Queue()
        self._failures: Counter[tuple[WorkerId, int]] = Counter()
        self._under_way: dict[WorkerId, set[asyncio.Task]] = defaultdict(set)
        self.calls: list[tuple[str, int]] = []
        self.went_back = 0

    async def _wait(self, name: str, cell: int) -> None:
        self.calls.append((name, cell))
        await asyncio.sleep(self._random.choice([0, 0, self._random.uniform(0, 5)]))

    def killed(self, member: WorkerId) -> WorkerLost:
        """The member is dead; to be raised."""
        self._dead.add(member)
        (self._engines if member.part == "engine" else self._training).pop(member.cell, None)
        for call in self._under_way[member]:
            call.cancel()
        return WorkerLost(member, "died")

    def _dies(self, member: WorkerId) -> bool:
        """Whether the member is dead, perhaps from now on."""
        at = (member, self._version)
        may_die = (member != CORE or self._core_dies) and member not in self._dead and self._failures[at] < LOSSES
        if may_die and self._random.random() < self._failure:
            self._failures[at] += 1
            self.killed(member)
        return member in self._dead

    async def _on(self, member: WorkerId, name: str, call: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """A call that takes its time and ends when the member does."""

        async def work() -> T:
            await self._wait(name, member.cell)
            return await call(*args)

        if self._dies(member):
            await asyncio.sleep(self._random.choice([0, 1]))
            raise WorkerLost(member, "died")
        task = asyncio.ensure_future(work())
        self._under_way[member].add(task)
        # It may also die during the call, or later, when nobody calls.
        asyncio.get_running_loop().call_later(self._random.uniform(0, 20), self._die_alone, member)
        try:
            await asyncio.wait({task})
            if task.cancelled():
                raise WorkerLost(member, "died in the call")
            return task.result()
        finally:
            task.cancel()
            self._under_way[member].discard(task)

    def _die_alone(self, member: WorkerId) -> None:
        if self._dies(member):
            self._losses.put_nowait(ProcessFailure(worker=member, detail=f"{member} ended"))

    async def next_failure(self):
        return await self._losses.get()

    async def replace(self, member):
        await self._wait(f"replace {member}", member.cell)
        assert member in self._dead, f"{member} lives"
        at = (member, self._version)
        if self._random.random() < self._failure and self._failures[at] < LOSSES:
            self._failures[at] += 1
            raise WorkerLost(member, "did not start")
        self._dead.discard(member)

    async def go_back(self):
        await self._on(CORE, "go_back", asyncio.sleep, 0)
        self.went_back += 1
        # What is published changes for cells and controller at once.
        return await super().go_back()

    async def set_admitting(self, cells):
        await super().set_admitting([cell for cell in cells if WorkerId("engine", cell) not in self._dead])
        await self._wait(f"admit {cells}", -1)

    async def leave_rollout(self, cell):
        return await self._on(WorkerId("engine", cell), "leave_rollout", super().leave_rollout, cell)

    async def enter_training(self, cell, version):
        await self._on(WorkerId("trainer", cell), "enter_training", self._pull, cell, version)

    async def _pull(self, cell, version):
        if cell and CORE in self._dead:
            raise WorkerLost(CORE, "died")
        await super().enter_training(cell, version)

    async def train(self, cell, work):
        return await self._on(WorkerId("trainer", cell), "train", super().train, cell, work)

    async def leave_training(self, cell):
        await self._on(WorkerId("trainer", cell), "leave_training", super().leave_training, cell)

    async def enter_rollout(self, cell, version):
        self._demand(version == self._published, f"Cell {cell} serves {version}, published {self._published}.")
        await self._on(WorkerId("engine", cell), "enter_rollout", self._load, cell, version)

    async def _pass_on(self, version):
        """Engines may be lost meanwhile."""
        await super().publish(version, list(self._engines))

    async def _load(self, cell, version):
        """The run may have gone back meanwhile: then these weights are no longer the published ones."""
        if cell in self._known:
            await self._spend(cell, self._times.to_rollout_s)
        self._known.add(cell)
        self._engines[cell] = version

    async def checkpoint(self, version):
        await self._on(CORE, "checkpoint", super().checkpoint, version)

    async def checkpoint_written(self, version):
        """Sometimes longer than whole bursts."""
        await self._on(CORE, "write", asyncio.sleep, self._random.choice([0, 5, 200]))
        return await super().checkpoint_written(version)

    async def update(self, training_cells):
        await self._wait("update", training_cells)
        dead = [cell for cell in range(training_cells) if self._dies(WorkerId("trainer", cell))]
        if 0 in dead:
            raise WorkerLost(CORE, "died")
        if dead:
            raise GroupBroken(f"cells {dead} did not take part")
        return await super().update(training_cells)

    async def publish(self, version, engines):
        failed = {cell: "died" for cell in engines if self._dies(WorkerId("engine", cell))}
        alive = [cell for cell in engines if cell not in failed]
        self._demand(set(alive) == set(self._engines), f"{alive} are not the engines that serve.")
        await self._on(CORE, "publish", self._pass_on, version)
        return Publication(failed=failed)


class ListJournal:
    def __init__(self) -> None:
        self.events: list[ev.Event] = []

    def write(self, event: ev.Event) -> None:
        self.events.append(event)


class MortalJournal:
    """What a killed controller still does reaches nobody."""

    def __init__(self, journal: ListJournal) -> None:
        self._journal: ListJournal | None = journal

    def write(self, event: ev.Event) -> None:
        if self._journal is not None:
            self._journal.write(event)

    def kill(self) -> None:
        self._journal = None


class World:
    """One controller and what it did."""

    def __init__(
        self,
        config: SchedulerConfig,
        seed: int,
        *,
        failure: float = 0.0,
        core_dies: bool = False,
        no_signal: float = 0.2,
        graded: float = 0.0,
    ) -> None:
        self.graded = graded
        self.config = config
        self.seed = seed
        self.failure = failure
        self.core_dies = core_dies
        self.no_signal = no_signal
        self.journal = ListJournal()
        self.outcomes: dict[str, Outcome] = {}
        self.cells: RandomCells | None = None
        self.last_view: ControlView | None = None

    def run(
        self,
        max_steps: int | None = None,
        *,
        initial: ControlState = FRESH,
        cancel_at: float | None = None,
        crash: bool = False,
    ) -> bool:
        """True when the run completed, False when it was cancelled at `cancel_at`. With `crash`, nothing is known of
        what was journaled or closed after `cancel_at`."""
        return run_virtual(self._run(max_steps, initial, cancel_at, crash))

    def run_through(self, kills: list[float]) -> None:
        """A run whose controller is killed after each of these times; executions outlive it, cells do not."""
        run_virtual(self._run_through(kills))

    async def _run_through(self, kills: list[float]) -> None:
        self.executions = executions = HeldExecutions(self.seed, self.graded)
        executions.outcomes = self.outcomes
        state, saved, rng = FRESH, 0, random.Random(self.seed)
        materializer = SimMaterializer(lambda _: [] if rng.random() < self.no_signal else [3.0] * rng.randint(1, 4))
        for number, kill in enumerate([*kills, None]):
            self.cells = RandomCells(self.seed + number, saved, self.failure, self.core_dies)
            journal = MortalJournal(self.journal)
            environment = Environment(VirtualClock(), RandomQueries(), executions, materializer, self.cells, journal)
            controller = Controller(self.config, environment, state, RecoverySection(futile_s=1e9))
            task = asyncio.ensure_future(controller.run())
            await asyncio.wait({task}, timeout=kill)
            self.last_view = controller.view()
            if task.done():
                task.result()
                return
            journal.kill()
            task.cancel()
            await asyncio.wait({task})
            saved = self.cells.saved
            state = resume_state(self.journal.events, self.outcomes, saved, outlived=True)
            self.journal.write(ev.RunStarted(t=0.0, run_id="w", resumed_from=saved, outlived=state.outlived))

    async def _run(self, max_steps: int | None, initial: ControlState, cancel_at: float | None, crash: bool) -> bool:
        seed = self.seed + 1000 * initial.incarnation
        rng = random.Random(seed)
        executions = RandomExecutions(seed, graded=self.graded)
        executions.outcomes = self.outcomes
        self.cells = RandomCells(seed, initial.version, self.failure, self.core_dies)
        materializer = SimMaterializer(
            lambda _: [] if rng.random() < self.no_signal else [rng.uniform(0.3, 13)] * rng.randint(1, 4)
        )
        controller = Controller(
            self.config,
            Environment(
                VirtualClock(),
                RandomQueries(),
                executions,
                materializer,
                self.cells,
                self.journal,
            ),
            initial,
            limits=RecoverySection(futile_s=1e9),
        )
        task = asyncio.ensure_future(controller.run(max_steps))
        if cancel_at is not None:
            await asyncio.wait({task}, timeout=cancel_at)
            known = len(self.journal.events), self.outcomes.copy()
            task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return False
        finally:
            assert asyncio.all_tasks() == {asyncio.current_task()}
            self.last_view = controller.view()
            if cancel_at is not None and crash:
                del self.journal.events[known[0] :]
                for name in self.outcomes.keys() - known[1].keys():
                    del self.outcomes[name]
        return True


def of(events: list[ev.Event], *kinds: type) -> list:
    return [event for event in events if isinstance(event, kinds)]


def check_journal(config: SchedulerConfig, events: list[ev.Event], *, complete: bool = True) -> None:
    """Recounts d, p, f, roles and staleness of one fresh incarnation from its journal alone."""
    d = p = f = k = published = version = 0
    burst_d, burst_w = None, None
    dispatched: dict[int, int] = {}
    consumed: set[int] = set()
    open_members = Counter[int]()
    running: set[str] = set()
    grading: set[str] = set()
    roles = ["training" if config.mode == "async" else "rollout"] * config.cells
    if config.mode == "async":
        k = config.cells
    leaving: set[int] = set()
    total_staleness = outstanding = bursts = saved = initial_age = 0
    taken_by: dict[int, int] = {}
    gone_back = False
    for event in events:
        match event:
            case ev.GroupDispatched():
                assert event.group not in dispatched
                assert event.version == published
                assert config.dispatch == "continuous" or config.mode == "async" or k <= 1, "joins see what is queued"
                dispatched[event.group] = event.version
                open_members[event.group] = config.executions_per_group
                d += config.executions_per_group
                burst_d, burst_w = None, None
            case ev.ExecutionStarted():
                p += 1
                assert event.execution_id not in running
                running.add(event.execution_id)
            case ev.ExecutionTerminated():
                f += 1
                running.remove(event.execution_id)
                grading.add(event.execution_id)
            case ev.ExecutionClosed():
                grading.remove(event.execution_id)
                open_members[event.group] -= event.cause != "cancelled"
            case ev.GroupReady():
                assert open_members[event.group] == 0
            case ev.TransitionStarted(source="rollout"):
                assert event.cell == k, "serial, in prefix order"
                assert roles[event.cell] == "rollout"
                k += 1
                assert event.waterlevel <= capacity(config, k)
            case ev.TransitionStarted(source="training"):
                assert roles[event.cell] == "training"
                assert event.cell not in leaving, "sent back once"
                leaving.add(event.cell)
            case ev.TransitionFinished():
                roles[event.cell] = event.target
                if event.source == "training":
                    leaving.discard(event.cell)
                if event.target == "rollout" and event.cell == 0:
                    k = 0
            case ev.StepDone():
                assert event.step == version + 1
                assert event.cells == list(range(len(event.cells)))
                assert len(event.groups) == config.groups_per_step
                assert not consumed & set(event.groups), "a group was trained twice"
                assert all(open_members[group] == 0 for group in event.groups)
                assert event.staleness == [version - dispatched[group] for group in event.groups]
                consumed |= set(event.groups)
                taken_by.update(dict.fromkeys(event.groups, event.step))
                total_staleness += sum(event.staleness)
                version = event.step
            case ev.RunWentBack():
                assert event.version == saved <= version == event.lost
                again = {group for group, step in taken_by.items() if step > saved}
                assert again <= set(event.ready_again)
                assert all(open_members[group] == 0 for group in event.ready_again)
                assert event.relabelled == sorted(
                    g for g, at in dispatched.items() if at > saved and g not in consumed - again
                )
                dispatched |= dict.fromkeys(event.relabelled, saved)
                consumed -= again
                taken_by = {group: step for group, step in taken_by.items() if step <= saved}
                version = published = saved
                gone_back = True
                burst_d, burst_w = None, None
            case ev.CheckpointSaved():
                assert saved <= event.version <= version
                saved = event.version
            case ev.Published():
                published = event.version
                assert published == version
                if config.mode != "async":
                    assert roles[1:] == ["rollout"] * (config.cells - 1), "satellites return before the publication"
                    k = 0 if gone_back else min(k, 1)
                if gone_back:
                    total_staleness = outstanding = bursts = 0
                    initial_age = sum(published - at for group, at in dispatched.items() if group not in consumed)
                    gone_back = False
                elif version % config.steps_per_burst == 0:
                    ages = [published - at for group, at in dispatched.items() if group not in consumed]
                    outstanding += len(ages)
                    bursts += 1
                    assert total_staleness == (
                        initial_age
                        + config.steps_per_burst * outstanding
                        + bursts * config.groups_per_step * config.steps_per_burst * (config.steps_per_burst - 1) // 2
                        - sum(ages)
                    )
            case _:
                pass
        assert 0 <= f <= p <= d
        assert p - f == len(running) <= capacity(config, k) if event.t else True
        active = [cell for cell in range(config.cells) if roles[cell] == "training" and cell not in leaving]
        assert active == list(range(len(active))), "the training set is a prefix"
        if config.dispatch == "boundary" and not isinstance(event, ev.GroupDispatched):
            assert burst_d in (None, d)
            assert burst_w is None or d - f <= burst_w
            burst_d, burst_w = d, d - f
    if complete:
        assert d == config.executions_per_group * len(dispatched)
        assert p == f, "every launched execution terminated"
        assert not grading, "every terminated execution was closed"
        assert len(consumed) == version * config.groups_per_step
