"""Carries model calls to engines and keeps them alive while cells change their role.

An execution stays on one engine while that engine admits. A call whose engine stops (drain, crash, abort) goes on at
another one from the tokens already produced, and takes its KV along when the engine still has it; while no engine
admits, it is held. What was yielded is never taken back.
"""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Protocol

import msgspec

from gyre.core.errors import GyreError, NotReady, PeerLost, PromptMismatch
from gyre.core.expert_routing import ExpertRouting
from gyre.core.records import FinishReason
from gyre.core.tokens import TokenIds
from gyre.engines.base import Engine, GenerateRequest, Sampling
from gyre.proxy.base import DrainReport, EngineRoute
from gyre.proxy.errors import CallError, Fault
from gyre.proxy.router.engine_call import EngineCall
from gyre.proxy.router.kv_handoff import hand_off
from gyre.proxy.router.placement import place, relocate


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Newly produced tokens of a call; the last piece carries `finish`, which is never "abort"."""

    output_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    cell: int
    cached_tokens: int = 0
    finish: FinishReason | None = None
    routing: ExpertRouting | None = None
    """Experts of the next positions from `routing_from` on, each told once however often the call moves."""


class EngineLink(Protocol):
    """An open connection to an engine."""

    @property
    def stub(self) -> Engine: ...

    async def close(self) -> None: ...


class RouterLimits(msgspec.Struct, frozen=True, kw_only=True):
    hold_s: float
    """How long a call may be without an engine that produces something for it, from the first time it must wait."""
    stall_s: float
    """How long an admitting engine may deliver nothing for a call."""
    drain_s: float
    """How long a leaving engine may take to hand over its partial outputs before they are cut here."""
    handoff_s: float = 10.0
    """How long the KV of a call that moves may take; afterwards its context is computed anew."""
    retry_s: float = 0.25
    """Rest before an engine that failed is asked again."""


class Router:
    def __init__(self, connect: Callable[[str], EngineLink], limits: RouterLimits) -> None:
        self._connect = connect
        self._limits = limits
        self._routes: dict[int, EngineRoute] = {}
        self._links: dict[str, EngineLink] = {}
        self._home: dict[str, int] = {}
        self._engine_calls: set[EngineCall] = set()
        self._routes_changed = asyncio.Event()
        self._leg_ended = asyncio.Event()
        self._request_numbers = itertools.count()
        self._waiting: Counter[str] = Counter()
        """Execution → its calls that wait for an engine."""
        self.prompt_mismatches = 0
        self.transition_errors = 0
        """Calls that failed although only a change of roles stood in their way."""

    def set_routes(self, routes: list[EngineRoute]) -> None:
        self._routes = {route.cell: route for route in routes}
        self._routes_changed.set()
        self._routes_changed = asyncio.Event()

    def settle(self, execution_id: str, cells: list[int]) -> None:
        """The execution's latest call ran on these cells: the last one may still have its KV."""
        if cells:
            self._home[execution_id] = cells[-1]

    def forget(self, execution_id: str) -> None:
        """The execution has ended: its place on an engine is free."""
        self._home.pop(execution_id, None)

    @property
    def held(self) -> int:
        """Calls that wait for an engine."""
        return self._waiting.total()

    def waits(self, execution_id: str) -> bool:
        """Whether a call of the execution waits for an engine."""
        return self._waiting[execution_id] > 0

    def running_by_cell(self) -> dict[int, int]:
        return dict(Counter(engine_call.cell for engine_call in self._engine_calls))

    async def generate(
        self,
        execution_id: str,
        prompt_ids: TokenIds,
        max_new_tokens: int,
        sampling: Sampling,
        routing_from: int | None = None,
    ) -> AsyncGenerator[Piece, None]:
        """Samples one answer, over as many engines as it takes. Closing the iterator cancels it at the engine.
        `routing_from`: the first position whose experts are wanted, None for none.

        Raises CallError (UNAVAILABLE) when no engine admits for `hold_s`, PromptMismatch, InvariantViolation.
        """
        input_ids, produced = prompt_ids, list[int]()
        resting: set[int] = set()
        held_until: float | None = None
        while True:
            route = self._choose(execution_id, resting)
            if route is None:
                # Engines that admit a call and fail it do not begin a new wait.
                held_until = held_until or asyncio.get_running_loop().time() + self._limits.hold_s
                route = await self._hold(execution_id, resting, held_until)
            if len(input_ids) < len(prompt_ids) + len(produced):
                input_ids = TokenIds(prompt_ids + produced)
            request = GenerateRequest(
                request_id=f"{execution_id}/{next(self._request_numbers)}",
                input_ids=input_ids,
                max_new_tokens=max_new_tokens - len(produced),
                sampling=sampling,
                routing_from=routing_from,
            )
            engine_call = EngineCall(route.cell, self._engine(route.address), request)
            self._engine_calls.add(engine_call)
            before = len(produced)
            try:
                async for chunk in engine_call.chunks(self._limits.stall_s):
                    produced += chunk.output_ids
                    if routing_from is not None and chunk.routing is not None:
                        # What one engine told, the next one is not asked for.
                        routing_from += chunk.routing.positions
                    finish = _finish(chunk.finish, produced, max_new_tokens, sampling)
                    yield Piece(
                        output_ids=chunk.output_ids,
                        logprobs=chunk.logprobs,
                        versions=chunk.versions,
                        cell=engine_call.cell,
                        cached_tokens=chunk.cached_tokens,
                        finish=finish,
                        routing=chunk.routing,
                    )
                    if finish is not None:
                        return
                    if engine_call.leaving and chunk.finish is None:
                        # The first request to abort may have come before the engine knew this call.
                        await _leave(engine_call)
                engine_call.moved = True
                if engine_call.leaving and engine_call.aborted:
                    # The drain waits for this engine_call, so its engine keeps its memory until here.
                    input_ids = TokenIds(prompt_ids + produced)
                    engine_call.kv_tokens = await hand_off(
                        request.request_id,
                        input_ids,
                        engine_call.engine,
                        self._destinations(execution_id, resting),
                        self._limits.handoff_s,
                    )
            except (PeerLost, NotReady):
                engine_call.moved = True
                resting.add(route.cell)
            except PromptMismatch:
                self.prompt_mismatches += 1
                raise
            finally:
                engine_call.cut()
                self._engine_calls.discard(engine_call)
                self._leg_ended.set()
                self._leg_ended = asyncio.Event()
            if (finish := _finish("abort", produced, max_new_tokens, sampling)) is not None:
                # The engine was lost behind the last token, before it said that this is the end.
                yield Piece(output_ids=[], logprobs=[], versions=[], cell=engine_call.cell, finish=finish)
                return
            if len(produced) > before:
                held_until = None
            elif not engine_call.leaving:
                # An engine that aborts at once is not asked in a busy loop.
                resting.add(route.cell)

    async def drain(self, cell: int) -> DrainReport:
        """Moves the calls of `cell` away. Raises GyreError when the cell still admits."""
        if cell in self._routes:
            raise GyreError(f"cell {cell} still admits calls: set the routes without it before it is drained")
        errors_before = self.transition_errors
        engine_calls = [engine_call for engine_call in self._engine_calls if engine_call.cell == cell]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.drain_s):
                await asyncio.gather(*(_leave(engine_call) for engine_call in engine_calls))
                await self._wait_gone(engine_calls)
        for engine_call in engine_calls:
            engine_call.cut()
        await self._wait_gone(engine_calls)
        return DrainReport(
            calls_in_flight=len(engine_calls),
            rerouted=sum(engine_call.moved for engine_call in engine_calls),
            with_kv=sum(engine_call.kv_tokens > 0 for engine_call in engine_calls),
            failed=self.transition_errors - errors_before,
        )

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in self._links.values()))

    async def _wait_gone(self, engine_calls: list[EngineCall]) -> None:
        while any(engine_call in self._engine_calls for engine_call in engine_calls):
            await self._leg_ended.wait()

    async def _hold(self, execution_id: str, resting: set[int], until: float) -> EngineRoute:
        """Waits for the engine of the next engine call. Engines in `resting` failed this call a moment ago; they
        are asked again only after a rest, and only when no other admits."""
        route = None
        self._waiting[execution_id] += 1
        try:
            async with asyncio.timeout_at(until):
                while route is None:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._limits.retry_s if resting else None):
                            await self._routes_changed.wait()
                    resting.clear()
                    route = self._choose(execution_id, resting)
        except TimeoutError:
            # Without routes it is a change of roles that takes too long; otherwise the engines themselves fail.
            self.transition_errors += not self._routes
            message = f"No engine admitted this call for {self._limits.hold_s:g} s; try again."
            raise CallError(Fault.UNAVAILABLE, message, retry_after_s=5) from None
        finally:
            self._waiting[execution_id] -= 1
            if not self._waiting[execution_id]:
                del self._waiting[execution_id]
        return route

    def _choose(self, execution_id: str, resting: set[int]) -> EngineRoute | None:
        home = self._home.get(execution_id)
        if home in self._routes and home not in resting:
            return self._routes[home]
        candidates = [route for route in self._routes.values() if route.cell not in resting]
        if not candidates:
            return None
        assigned = Counter(self._home.values())
        route = place(candidates, assigned, execution_id) if home is None else relocate(candidates, assigned)
        self._home[execution_id] = route.cell
        return route

    def _destinations(self, execution_id: str, resting: set[int]) -> Iterator[Engine]:
        """The engine of the next engine_call. Asked again, that one is taken for lost and rests."""
        while (route := self._choose(execution_id, resting)) is not None:
            yield self._engine(route.address)
            resting.add(route.cell)

    def _engine(self, address: str) -> Engine:
        if address not in self._links:
            self._links[address] = self._connect(address)
        return self._links[address].stub


async def _leave(engine_call: EngineCall) -> None:
    # A dead or unwilling engine is no obstacle: its engine_call is cut when the time is over.
    with contextlib.suppress(GyreError):
        await engine_call.leave()


def _finish(
    reported: FinishReason | None, produced: list[int], max_new_tokens: int, sampling: Sampling
) -> FinishReason | None:
    """An aborted request that happened to be complete is complete; any other abort is not an end."""
    if reported != "abort":
        return reported
    if produced and produced[-1] in sampling.stop_token_ids:
        return "stop"
    return "length" if len(produced) >= max_new_tokens else None
