"""`ProxyControl` and `Runner` over processes that may be lost and started again (`service`).

A proxy worker finds its sessions in the run directory and is told the routes. A runner finds its executions at the
shim, once they are started there again: `start` may be repeated.
"""

from gyre.control.live.fleet.service import Service
from gyre.core.records import CallFacts, SessionAccess
from gyre.proxy.base import DrainReport, EngineRoute, ProxyControl, ProxyStats, SessionSpec, SessionSummary
from gyre.runner.base import ExecutionReport, ExecutionSpec, Isolation, Runner


class LastingProxy:
    """Implements `ProxyControl`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._routes: list[EngineRoute] = []
        service.restored = self._tell_routes

    async def open_session(self, spec: SessionSpec) -> SessionAccess:
        return await self._service.call(lambda proxy: proxy.open_session(spec))

    async def close_session(self, execution_id: str) -> SessionSummary:
        return await self._service.call(lambda proxy: proxy.close_session(execution_id))

    async def set_routes(self, routes: list[EngineRoute]) -> None:
        self._routes = routes
        await self._service.call(self._tell_routes)

    async def drain(self, cell: int) -> DrainReport:
        return await self._service.call(lambda proxy: proxy.drain(cell))

    async def stats(self) -> ProxyStats:
        return await self._service.call(lambda proxy: proxy.stats())

    async def _tell_routes(self, proxy: ProxyControl) -> None:
        await proxy.set_routes(self._routes)


class LastingRunner:
    """What `LiveExecutions` needs of a runner."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def isolation(self) -> Isolation:
        return await self._service.call(lambda runner: runner.isolation())

    async def held(self, spec: ExecutionSpec) -> None:
        """Starts the execution and returns when its harness has ended."""

        async def held(runner: Runner) -> None:
            await runner.start(spec)
            await runner.wait_closed(spec.execution_id)

        await self._service.call(held)

    async def outcome(self, spec: ExecutionSpec, calls: CallFacts) -> ExecutionReport:
        """Returns when the outcome is designated."""

        async def graded(runner: Runner) -> ExecutionReport:
            await runner.start(spec)
            return await runner.wait(spec.execution_id, calls)

        return await self._service.call(graded)

    async def cancel(self, execution_id: str) -> None:
        await self._service.call(lambda runner: runner.cancel(execution_id))
