"""Several proxy workers as one: every execution belongs to one of them, for its whole life."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec

from gyre.core.records import SessionAccess
from gyre.proxy.base import DrainReport, EngineRoute, ProxyControl, ProxyStats, SessionSpec, SessionSummary

R = TypeVar("R", DrainReport, ProxyStats)


def worker_of(execution_id: str, workers: int) -> int:
    """The index of the worker that serves an execution: the same in every process and in a resumed run."""
    return int.from_bytes(blake2b(execution_id.encode(), digest_size=8).digest(), "big") % workers


def share_of(route: EngineRoute, worker: int, workers: int) -> EngineRoute:
    """What one worker may place on an engine. The shares of all workers sum to the engine's capacity; which of them
    gets the remainder changes from cell to cell."""
    turn = (worker + route.cell) % workers
    capacity = route.capacity * (turn + 1) // workers - route.capacity * turn // workers
    return msgspec.structs.replace(route, capacity=capacity)


def total(reports: Sequence[R]) -> R:
    """Of at least one report, field by field: counts are added, those by cell cell by cell."""
    kind = type(reports[0])
    fields: dict[str, Any] = {}
    for name in kind.__struct_fields__:
        first, *more = (getattr(report, name) for report in reports)
        fields[name] = sum(more, first) if isinstance(first, int) else dict(sum(map(Counter, more), Counter(first)))
    return kind(**fields)


class ProxyWorkers:
    """Implements `ProxyControl` over the controls of at least one worker. What concerns engines goes to all of them;
    what they report is summed."""

    def __init__(self, workers: Sequence[ProxyControl]) -> None:
        self._workers = workers

    async def open_session(self, spec: SessionSpec) -> SessionAccess:
        return await self._of(spec.execution_id).open_session(spec)

    async def close_session(self, execution_id: str) -> SessionSummary:
        return await self._of(execution_id).close_session(execution_id)

    async def set_routes(self, routes: list[EngineRoute]) -> None:
        count = len(self._workers)
        await asyncio.gather(
            *(
                worker.set_routes([share_of(route, index, count) for route in routes])
                for index, worker in enumerate(self._workers)
            )
        )

    async def drain(self, cell: int) -> DrainReport:
        return total(await asyncio.gather(*(worker.drain(cell) for worker in self._workers)))

    async def stats(self) -> ProxyStats:
        return total(await asyncio.gather(*(worker.stats() for worker in self._workers)))

    def _of(self, execution_id: str) -> ProxyControl:
        return self._workers[worker_of(execution_id, len(self._workers))]
