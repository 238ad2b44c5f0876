"""Which engine an execution's calls go to. Pure: the router owns the state and calls these."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from gyre.proxy.base import EngineRoute


def place(routes: Sequence[EngineRoute], assigned: Mapping[int, int], execution_id: str) -> EngineRoute:
    """The engine for an execution without one: least loaded for its capacity, ties by rendezvous hash.

    `assigned` counts executions by cell. `routes` must not be empty. Capacity is a weight, not a limit: the scheduler
    launches no more executions than there is capacity, and a call is never refused for it.
    """
    return min(routes, key=lambda route: (_load(route, assigned), _rendezvous(route.cell, execution_id)))


def relocate(routes: Sequence[EngineRoute], assigned: Mapping[int, int]) -> EngineRoute:
    """The engine for an execution whose cell leaves rollout: of those with room the last one, which is an
    engine of the pool or the cell that leaves last (docs/transitions.md); without room anywhere, the least loaded."""
    with_room = [route for route in routes if assigned.get(route.cell, 0) < route.capacity]
    if not with_room:
        return min(routes, key=lambda route: (_load(route, assigned), -route.cell))
    return max(with_room, key=lambda route: route.cell)


def _load(route: EngineRoute, assigned: Mapping[int, int]) -> float:
    return assigned.get(route.cell, 0) / max(route.capacity, 1)


def _rendezvous(cell: int, execution_id: str) -> bytes:
    return blake2b(f"{cell}:{execution_id}".encode(), digest_size=8).digest()
