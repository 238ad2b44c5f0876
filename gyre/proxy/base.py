"""The proxy worker as the controller sees it. Harnesses see only its HTTP routes."""

from typing import Protocol

import msgspec

from gyre.core.records import SessionAccess


class EngineRoute(msgspec.Struct, frozen=True, kw_only=True):
    cell: int
    """Index of the cell; pool engines have negative indices −1, −2, …"""
    address: str
    """RPC address of the cell's engine."""
    capacity: int
    """Executions that it may carry."""


class SessionSpec(msgspec.Struct, frozen=True, kw_only=True):
    execution_id: str
    harness: str
    """Name of the harness profile (role markers, canned answers)."""


class SessionSummary(msgspec.Struct, frozen=True, kw_only=True):
    execution_id: str
    calls: int
    orphans: int
    retries_attached: int
    retries_replayed: int
    drift: dict[str, int]
    max_staleness_versions: int = 0
    unserved: int = 0
    """Requests whose latest answer was such a failure: the harness asked, perhaps again and again, and never got an
    answer. 0 says that every failure was made good by a retry. Auxiliary requests do not count."""
    cut_answers: int = 0
    """Answers that ended at the token limit instead of the policy's stop token. They are recorded and may train."""


class DrainReport(msgspec.Struct, frozen=True, kw_only=True):
    calls_in_flight: int
    rerouted: int
    with_kv: int
    """Of the rerouted ones, how many took their KV along; the context of the others is computed anew."""
    failed: int
    """Calls whose harness saw an error because of the drain; must be 0."""


class ProxyStats(msgspec.Struct, frozen=True, kw_only=True):
    sessions: int
    calls_running: int
    calls_done: int
    calls_by_cell: dict[int, int]
    held: int
    """Calls waiting (with keep-alives) because no engine is routable."""
    prompt_mismatches: int
    harness_errors_from_transitions: int
    retries: int
    """Requests recognised as a repeat of a call: attached to it or replayed."""


class ProxyControl(Protocol):
    async def open_session(self, spec: SessionSpec) -> SessionAccess: ...

    async def close_session(self, execution_id: str) -> SessionSummary:
        """No call is served afterwards; running ones are cancelled and kept as orphans. Returns when every record of
        the execution is in the store. Idempotent."""
        ...

    async def set_routes(self, routes: list[EngineRoute]) -> None:
        """Engines that admit calls from now on. Calls running elsewhere are not touched; with an empty list new calls
        are held with keep-alives."""
        ...

    async def drain(self, cell: int) -> DrainReport:
        """Moves every call that runs on `cell` to the admitting engines, from the tokens already produced. Returns when
        none is left there. The cell must not be in the routes any more."""
        ...

    async def stats(self) -> ProxyStats: ...
