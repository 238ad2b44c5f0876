"""The controller's side of a proxy worker: sessions open and close, routes change, cells drain."""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from gyre.core.errors import GyreError, SessionClosed
from gyre.core.records import CallRecord, SessionAccess
from gyre.proxy.base import DrainReport, EngineRoute, ProxyStats, SessionSpec, SessionSummary
from gyre.proxy.http.routes import SessionRegistry
from gyre.proxy.session.log import SessionLog
from gyre.proxy.session.services import Services
from gyre.proxy.session.session import Session
from gyre.trajectory.roles import RoleMarkers

log = logging.getLogger(__name__)


class Profile(Protocol):
    """The part of a harness profile that a session needs."""

    @property
    def markers(self) -> RoleMarkers: ...

    @property
    def canned_answers(self) -> Mapping[str, str]: ...


class Sockets(Protocol):
    """Addresses of sessions."""

    def open(self, execution_id: str) -> str: ...

    async def close(self, execution_id: str) -> None: ...


class Proxy:
    """Implements `ProxyControl` over the sessions of this worker."""

    def __init__(
        self,
        services: Services,
        registry: SessionRegistry,
        load_profile: Callable[[str], Profile],
        sockets: Sockets | None = None,
        sessions: SessionLog | None = None,
    ) -> None:
        """`load_profile` finds the profile of a harness by name; it raises ConfigError for an unknown one. `sockets`
        are where sandboxes reach their sessions; `sessions` is what `restore` reads."""
        self._services = services
        self._registry = registry
        self._load_profile = load_profile
        self._sockets = sockets
        self._log = sessions
        self._sessions: dict[str, Session] = {}
        self._access: dict[str, SessionAccess] = {}
        self._summaries: dict[str, SessionSummary] = {}
        self._closed_counts: Counter[str] = Counter()

    async def open_session(self, spec: SessionSpec) -> SessionAccess:
        """Opening an open session again answers the same access, so that a controller that came back may repeat it.
        Raises ConfigError for an unknown harness, SessionClosed for an execution that has ended."""
        if spec.execution_id in self._summaries:
            raise SessionClosed(f"execution {spec.execution_id} has ended; a new one needs another id")
        if spec.execution_id in self._sessions:
            return self._access[spec.execution_id]
        session = self._new_session(spec)
        access = SessionAccess(
            path=f"/x/{secrets.token_urlsafe(24)}",
            api_key=f"sk-gyre-{secrets.token_urlsafe(24)}",
            socket=self._sockets.open(spec.execution_id) if self._sockets else "",
        )
        if self._log is not None:
            self._log.opened(spec, access)
        self._admit(access, session)
        return access

    def take_over(self) -> list[tuple[Session, int]]:
        """Opens the doors of the sessions that the log tells of, as the worker that wrote it had them: paths, keys,
        sockets, routes. Their requests wait for `restore`. Returns each with the number of workers that served it."""
        assert self._log is not None
        waiting = []
        for logged in self._log.sessions():
            execution_id = logged.spec.execution_id
            if logged.summary is not None:
                self._summaries[execution_id] = logged.summary
                self._registry.close(logged.access)
                continue
            session = self._new_session(logged.spec)
            session.restoring()
            self._log.taken_over(execution_id)
            self._admit(logged.access, session)
            if self._sockets is not None:
                self._sockets.open(execution_id)
            waiting.append((session, logged.workers + 1))
        self._services.router.set_routes(self._log.routes())
        return waiting

    async def restore(self, waiting: list[tuple[Session, int]], records: Callable[[str], list[CallRecord]]) -> None:
        """Gives sessions their trees and the answers that may be asked for again. `records` reads those of an
        execution; it is called from a thread. A session that cannot be restored serves no call any more."""
        assert self._log is not None
        for session, workers in waiting:
            try:
                found = await asyncio.to_thread(records, session.execution_id)
                calls = await asyncio.to_thread(self._log.calls, session.execution_id)
                session.restore(found, calls, workers)
            except GyreError:
                log.exception("the session of execution %s is lost", session.execution_id)
                session.lost()
        log.info("took over %d sessions", len(waiting))

    def _new_session(self, spec: SessionSpec) -> Session:
        profile = self._load_profile(spec.harness)
        return Session(spec.execution_id, profile.markers, profile.canned_answers, self._services)

    def _admit(self, access: SessionAccess, session: Session) -> None:
        self._registry.open(access, session)
        self._sessions[session.execution_id] = session
        self._access[session.execution_id] = access

    async def close_session(self, execution_id: str) -> SessionSummary:
        """Raises GyreError for an execution that was never opened here."""
        if execution_id in self._summaries:
            return self._summaries[execution_id]
        session = self._sessions.get(execution_id)
        if session is None:
            raise GyreError(f"execution {execution_id} has no session in this proxy worker")
        await session.ready()
        summary = await session.close()
        if execution_id not in self._summaries:
            if self._log is not None:
                self._log.closed(summary)
            self._summaries[execution_id] = summary
            self._closed_counts.update(session.counts)
            self._registry.close(self._access.pop(execution_id))
            del self._sessions[execution_id]
            if self._sockets is not None:
                await self._sockets.close(execution_id)
        return summary

    async def set_routes(self, routes: list[EngineRoute]) -> None:
        if self._log is not None:
            self._log.routes_set(routes)
        self._services.router.set_routes(routes)

    async def drain(self, cell: int) -> DrainReport:
        return await self._services.router.drain(cell)

    async def close(self) -> None:
        """Ends the service of every session; a worker that takes over goes on with them."""
        await asyncio.gather(*(session.close() for session in self._sessions.values()))

    async def stats(self) -> ProxyStats:
        router = self._services.router
        counts = self._closed_counts.copy()
        for session in self._sessions.values():
            counts.update(session.counts)
        return ProxyStats(
            sessions=len(self._sessions),
            calls_running=sum(session.running for session in self._sessions.values()),
            calls_done=counts["calls"],
            calls_by_cell=router.running_by_cell(),
            held=router.held,
            prompt_mismatches=router.prompt_mismatches,
            harness_errors_from_transitions=router.transition_errors,
            retries=counts["attached"] + counts["replayed"],
        )
