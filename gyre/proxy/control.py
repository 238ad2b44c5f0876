"""The controller's side of a proxy worker: sessions open and close, routes change, cells drain."""

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from gyre.core.errors import GyreError
from gyre.core.records import SessionAccess
from gyre.proxy.base import DrainReport, EngineRoute, ProxyStats, SessionSpec, SessionSummary
from gyre.proxy.http.routes import SessionRegistry
from gyre.proxy.session.services import Services
from gyre.proxy.session.session import Session
from gyre.trajectory.roles import RoleMarkers


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
    ) -> None:
        """`load_profile` finds the profile of a harness by name; it raises ConfigError for an unknown one. `sockets`
        are where sandboxes reach their sessions."""
        self._services = services
        self._registry = registry
        self._load_profile = load_profile
        self._sockets = sockets
        self._sessions: dict[str, Session] = {}
        self._access: dict[str, SessionAccess] = {}
        self._summaries: dict[str, SessionSummary] = {}
        self._closed_counts: Counter[str] = Counter()

    async def open_session(self, spec: SessionSpec) -> SessionAccess:
        """Opening an open session again answers the same access, so that a controller that came back may repeat it.
        Raises ConfigError for an unknown harness, GyreError for an execution that has ended."""
        if spec.execution_id in self._summaries:
            raise GyreError(f"execution {spec.execution_id} has ended; a new one needs another id")
        if spec.execution_id in self._sessions:
            return self._access[spec.execution_id]
        profile = self._load_profile(spec.harness)
        session = Session(spec.execution_id, profile.markers, profile.canned_answers, self._services)
        access = SessionAccess(
            path=f"/x/{secrets.token_urlsafe(24)}",
            api_key=f"sk-gyre-{secrets.token_urlsafe(24)}",
            socket=self._sockets.open(spec.execution_id) if self._sockets else "",
        )
        self._registry.open(access, session)
        self._sessions[spec.execution_id] = session
        self._access[spec.execution_id] = access
        return access

    async def close_session(self, execution_id: str) -> SessionSummary:
        """Raises GyreError for an execution that was never opened here."""
        if execution_id in self._summaries:
            return self._summaries[execution_id]
        session = self._sessions.get(execution_id)
        if session is None:
            raise GyreError(f"execution {execution_id} has no session in this proxy worker")
        summary = await session.close()
        if execution_id not in self._summaries:
            self._summaries[execution_id] = summary
            self._closed_counts.update(session.counts)
            self._registry.close(self._access.pop(execution_id))
            del self._sessions[execution_id]
            if self._sockets is not None:
                await self._sockets.close(execution_id)
        return summary

    async def set_routes(self, routes: list[EngineRoute]) -> None:
        self._services.router.set_routes(routes)

    async def drain(self, cell: int) -> DrainReport:
        return await self._services.router.drain(cell)

    async def close(self) -> None:
        """Ends every session."""
        await asyncio.gather(*(self.close_session(execution_id) for execution_id in list(self._sessions)))

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
