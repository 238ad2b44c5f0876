"""Dispatcher and launcher: queue groups, start executions while capacity is free, note how each one ended."""

from collections.abc import Callable

from gyre.control.base import Environment, Ticket
from gyre.control.shared_state import SharedState
from gyre.control.state import ControlState, execution_id
from gyre.control.task_supervisor import TaskSupervisor
from gyre.core.events import ExecutionClosed, ExecutionStarted, ExecutionTerminated, GroupDispatched, GroupReady
from gyre.core.records import Outcome, Validity
from gyre.scheduling.order import LaunchOrder


class Dispatcher:
    def __init__(
        self,
        state: SharedState,
        environment: Environment,
        tasks: TaskSupervisor,
        initial: ControlState,
        order: LaunchOrder,
        ready: Callable[[], bool],
    ) -> None:
        """Queues the unconsumed groups that the run starts with (`initial`). `ready` says whether an engine can take
        calls; without one nothing is launched."""
        self._state = state
        self._queries = environment.queries
        self._executions = environment.executions
        self._tasks = tasks
        self._order = order
        self._ready = ready
        self.incarnation = initial.incarnation
        """How often the run went back before what is launched now."""
        self._next = initial.next_group
        self.open = False
        """Engines can take work."""
        # Oldest first. They keep number and version, and the journal has them already.
        for pending in sorted(initial.pending, key=lambda group: (group.version, group.group)):
            state.ledger.dispatch(pending.group, pending.query, pending.version, pending.outcomes)

    def fill(self) -> None:
        """Queues new groups until (φ+μ)B hold a slot; a run that was resumed with less depth may have more. Under
        continuous dispatch a ready group holds none."""
        ledger, config = self._state.ledger, self._state.config
        holding = len(ledger.groups) - (ledger.ready if config.dispatch == "continuous" else 0)
        self.dispatch(max(0, config.depth - holding))

    def dispatch(self, groups: int) -> None:
        """Queues this many new groups at the published version."""
        state = self._state
        numbers = range(self._next, self._next + groups)
        self._next += groups
        entries = [(number, self._queries.query(number)) for number in numbers]
        for number, query in self._order.arrange(entries):
            state.ledger.dispatch(number, query, state.published)
            state.record(
                GroupDispatched(
                    t=state.clock.now(),
                    group=number,
                    query=query,
                    version=state.published,
                    predicted_s=self._order.predict(query),
                )
            )

    def take_over(self, initial: ControlState) -> None:
        """The executions that outlived the controller before go on under their names."""
        for pending in initial.pending:
            for member, outlived in pending.outlived.items():
                self._state.ledger.adopt(pending.group, member, terminated=outlived.terminated)
                ticket = Ticket(
                    execution_id=outlived.execution_id,
                    group=pending.group,
                    member=member,
                    query=pending.query,
                    version=pending.version,
                )
                following = self._follow(ticket, self._state.clock.now(), running=not outlived.terminated)
                self._tasks.spawn(following, outlived.execution_id)

    async def run(self) -> None:
        """Launches whenever it can; ends only by cancellation."""
        while True:
            await self._state.signal.until(lambda: self._free() > 0)
            self._launch()
            self._state.changed()

    def _free(self) -> int:
        """min{d − p, C_R − (p − f)} (paper §4.2)."""
        state, ledger = self._state, self._state.ledger
        if not self.open or not ledger.queued or not self._ready():
            return 0
        return min(ledger.queued, state.capacity - ledger.running)

    def _launch(self) -> None:
        for _ in range(self._free()):
            group, member = self._state.ledger.launch()
            ticket = Ticket(
                execution_id=execution_id(group.group, member, self.incarnation),
                group=group.group,
                member=member,
                query=group.query,
                version=group.version,
            )
            self._tasks.spawn(self._execute(ticket), ticket.execution_id)

    async def _execute(self, ticket: Ticket) -> None:
        state = self._state
        started = state.clock.now()
        state.record(
            ExecutionStarted(
                t=started,
                execution_id=ticket.execution_id,
                group=ticket.group,
                query=ticket.query,
                harness=self._executions.harness(ticket),
            )
        )
        await self._follow(ticket, started, running=True)

    async def _follow(self, ticket: Ticket, started: float, *, running: bool) -> None:
        """To the outcome. `running`: its harness has not ended."""
        state = self._state

        def terminate() -> None:
            nonlocal running
            if running:
                running = False
                self._terminated(ticket, started)

        def terminated() -> None:
            terminate()
            state.changed()

        try:
            outcome = await self._executions.run(ticket, terminated)
        except BaseException:
            terminate()
            state.ledger.cancel(ticket.group, ticket.member)
            self._closed(ticket, started, _cut_off(ticket))
            raise
        terminate()
        ready = state.ledger.close(ticket.group, ticket.member, outcome)
        self._closed(ticket, started, outcome)
        state.progressed()
        if ready:
            state.record(GroupReady(t=state.clock.now(), group=ticket.group))
            if state.config.dispatch == "continuous":
                self.fill()
        state.changed()

    def _terminated(self, ticket: Ticket, started: float) -> None:
        state = self._state
        now = state.clock.now()
        state.ledger.terminate(ticket.group, ticket.member, now - started)
        state.record(
            ExecutionTerminated(t=now, execution_id=ticket.execution_id, group=ticket.group, seconds=now - started)
        )
        self._order.observe(ticket.query, now - started)

    def _closed(self, ticket: Ticket, started: float, outcome: Outcome) -> None:
        now = self._state.clock.now()
        self._state.record(
            ExecutionClosed(
                t=now,
                execution_id=ticket.execution_id,
                group=ticket.group,
                validity=outcome.validity,
                reward=outcome.reward,
                cause=outcome.cause,
                seconds=now - started,
                grading_s=outcome.grading_s,
                waited_s=outcome.waited_s,
                usage=outcome.usage,
                message=outcome.message,
            )
        )


def _cut_off(ticket: Ticket) -> Outcome:
    return Outcome(
        execution_id=ticket.execution_id,
        validity=Validity.UNRESOLVED,
        reward=0.0,
        cause="cancelled",
        message="The run ended before the execution did.",
    )
