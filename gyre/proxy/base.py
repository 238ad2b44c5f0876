"""The proxy worker as the controller sees it. Harnesses see only its HTTP routes."""

from typing import Literal, Protocol

import msgspec

from gyre.core.records import SessionAccess

LastAnswer = Literal["none", "whole", "cut", "failed"]


class EngineRoute(msgspec.Struct, frozen=True, kw_only=True):
    cell: int
    """Number of the engine: that of its cell, 0…K−1; the pool's engines follow from K on."""
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
    failed_calls: dict[str, int] = {}
    """Calls that got no answer for the platform's reasons, by cause: "no_engine" (none admitted the call in time, or
    the harness stopped waiting for one), "error" (an engine or the proxy failed). Refusals that are the harness's own
    doing (a prompt that does not fit, too many calls at once, a bad request) are not among them."""
    unserved: int = 0
    """Requests whose latest answer was such a failure: the harness asked, perhaps again and again, and never got an
    answer. 0 says that every failure was made good by a retry. Auxiliary requests do not count."""
    cut_answers: int = 0
    """Answers that ended at the token limit instead of the policy's stop token. They are recorded and may train."""
    last_answer: LastAnswer = "none"
    """What the latest call that ended got, auxiliary ones aside: a "whole" answer, one "cut" at the token limit, or it
    "failed" for the platform's reasons. A harness that exits with an error behind a "cut" did so because of what the
    policy did, behind a "failed" because of the platform."""


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
