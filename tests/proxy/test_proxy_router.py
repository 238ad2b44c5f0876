"""The router: placement, moving calls between engines, holding, prompt check."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from proxy_fakes import Link, Script, ScriptedEngine, experts, logprob, until

from gyre import rpc
from gyre.core.errors import GyreError, InvariantViolation, NotReady, PeerLost, PromptMismatch
from gyre.core.expert_routing import joined
from gyre.core.tokens import TokenIds
from gyre.engines.base import Engine, GenerateChunk, GenerateRequest, Sampling
from gyre.proxy.base import EngineRoute
from gyre.proxy.errors import CallError
from gyre.proxy.router.placement import place, relocate
from gyre.proxy.router.router import Piece, Router, RouterLimits

LIMITS = RouterLimits(hold_s=5.0, stall_s=5.0, drain_s=0.3, retry_s=0.02)
PROMPT = TokenIds([1, 2, 3, 4])


def route(cell: int, capacity: int = 4) -> EngineRoute:
    return EngineRoute(cell=cell, address=f"mem:{cell}", capacity=capacity)


class World:
    def __init__(self, tokenizer: Any, cells: list[int], limits: RouterLimits = LIMITS) -> None:
        self.script = Script(tokenizer, lambda prompt: "0123456789" * 4)
        self.engines = {cell: ScriptedEngine(self.script, version=cell + 10) for cell in cells}
        self.router = Router(lambda address: Link(self.engines[int(address[4:])]), limits)
        self.sampling = Sampling(stop_token_ids=[tokenizer.convert_tokens_to_ids("<|im_end|>")])
        self.expected = [*tokenizer.encode("0123456789" * 4), self.sampling.stop_token_ids[0]]

    async def call(self, execution: str = "e", limit: int = 100, routing_from: int | None = None) -> list[Piece]:
        pieces = self.router.generate(execution, PROMPT, limit, self.sampling, routing_from)
        return [piece async for piece in pieces]

    def check(self, pieces: list[Piece]) -> None:
        """Whole answer, in order, each token with the log-prob of its own position."""
        ids = [token for piece in pieces for token in piece.output_ids]
        assert ids == self.expected
        assert [p for piece in pieces for p in piece.logprobs] == [
            logprob(token, len(PROMPT) + i) for i, token in enumerate(ids)
        ]
        assert [piece.finish for piece in pieces if piece.finish] == ["stop"]


@pytest.fixture
def make_world(proxy_tokenizer: Any) -> Callable[..., World]:
    return lambda *args, **kwargs: World(proxy_tokenizer, *args, **kwargs)


def test_place_prefers_the_least_loaded_for_its_capacity() -> None:
    routes = [route(0, capacity=2), route(1, capacity=8)]
    assert place(routes, {0: 1, 1: 3}, "e").cell == 1
    assert place(routes, {0: 0, 1: 1}, "e").cell == 0


def test_place_breaks_ties_by_execution_and_spreads() -> None:
    routes = [route(cell) for cell in range(4)]
    cells = Counter(place(routes, {}, f"execution-{i}").cell for i in range(200))
    assert all(30 <= cells[cell] <= 70 for cell in range(4))


def test_relocate_takes_pool_first_then_the_cell_that_leaves_last() -> None:
    routes = [route(0), route(1), route(2), route(3)]
    assert relocate(routes, {}).cell == 3
    assert relocate(routes, {3: 4}).cell == 2
    assert relocate(routes, {3: 4, 2: 4}).cell == 1
    assert relocate(routes, {3: 4, 0: 4, 1: 5, 2: 4}).cell in (3, 0, 2)


async def test_T43_an_execution_stays_on_its_engine(make_world: Callable[..., World]) -> None:
    world = make_world([0, 1])
    world.router.set_routes([route(0), route(1)])
    for _ in range(3):
        await world.call("a")
        await world.call("b")
    assert sorted(len(engine.requests) for engine in world.engines.values()) == [3, 3]
    home = next(cell for cell, e in world.engines.items() if e.requests[0].request_id.startswith("a/"))
    world.router.set_routes([route(1 - home)])
    await world.call("a")
    world.router.set_routes([route(0), route(1)])
    await world.call("a")
    assert world.engines[1 - home].requests[-1].request_id.startswith("a/"), "it does not move back by itself"


async def test_T15_drain_moves_a_running_call_with_every_token(make_world: Callable[..., World]) -> None:
    world = make_world([0, 1])
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def step(done: int) -> None:
        if done >= 10:
            reached.set()
            await go_on.wait()

    world.engines[0].step = step
    world.router.set_routes([route(0)])
    running = asyncio.create_task(world.call())
    await reached.wait()
    world.router.set_routes([route(1)])
    report = await world.router.drain(0)
    assert (report.calls_in_flight, report.rerouted, report.failed) == (1, 1, 0)
    # The destination has other weights, so the KV of the source is of no use there.
    assert (report.with_kv, world.engines[0].offers, world.engines[1].taken) == (0, [], [])
    pieces = await running
    world.check(pieces)
    versions = [v for piece in pieces for v in piece.versions]
    assert versions == [10] * 10 + [11] * (len(versions) - 10)
    resumed = world.engines[1].requests[0]
    assert resumed.input_ids == PROMPT + world.expected[:10]
    assert resumed.max_new_tokens == 90


async def test_drain_refuses_a_cell_that_still_admits(make_world: Callable[..., World]) -> None:
    world = make_world([0])
    world.router.set_routes([route(0)])
    with pytest.raises(GyreError, match="still admits"):
        await world.router.drain(0)


async def test_drain_cuts_an_engine_that_does_not_let_go(make_world: Callable[..., World]) -> None:
    world = make_world([0, 1])
    reached = asyncio.Event()

    async def step(done: int) -> None:
        if done >= 10:
            reached.set()
            await asyncio.Event().wait()

    async def deaf(request_id: str) -> None: ...

    world.engines[0].step = step
    world.engines[0].abort = deaf  # type: ignore[method-assign]
    world.router.set_routes([route(0)])
    running = asyncio.create_task(world.call())
    await reached.wait()
    world.router.set_routes([route(1)])
    report = await world.router.drain(0)
    assert report.rerouted == 1
    world.check(await running)


@pytest.mark.parametrize("failure", [PeerLost("gone"), NotReady("no weights")])
@pytest.mark.parametrize("after", [None, 15])
async def test_T39_a_failing_engine_is_replaced(
    make_world: Callable[..., World], failure: Exception, after: int | None
) -> None:
    world = make_world([0, 1])
    world.engines[0].fail, world.engines[0].fail_after = failure, after
    world.router.set_routes([route(0)])
    running = asyncio.create_task(world.call())
    await until(lambda: world.engines[0].requests)
    world.router.set_routes([route(0), route(1)])
    world.check(await running)


@pytest.mark.parametrize("start", [None, 0, 3])
async def test_T27_a_call_that_moves_tells_the_experts_of_each_position_once(
    make_world: Callable[..., World], start: int | None
) -> None:
    """The engine that goes on is asked for what the lost one has not told."""
    world = make_world([0, 1])
    world.engines[0].fail, world.engines[0].fail_after = PeerLost("gone"), 15
    world.router.set_routes([route(0)])
    running = asyncio.create_task(world.call(routing_from=start))
    await until(lambda: world.engines[0].requests)
    world.router.set_routes([route(0), route(1)])
    pieces = await running
    world.check(pieces)
    told = [piece.routing for piece in pieces if piece.routing is not None]
    asked = [engine.requests[0].routing_from for engine in world.engines.values()]
    if start is None:
        assert (told, asked) == ([], [None, None])
        return
    assert joined(told) == experts(start, len(PROMPT) + len(world.expected) - 1)
    assert asked == [start, len(PROMPT) + 15 - 1]


async def test_T44_a_silent_engine_counts_as_lost(make_world: Callable[..., World]) -> None:
    limits = RouterLimits(hold_s=5.0, stall_s=0.05, drain_s=1.0, retry_s=0.02)
    world = make_world([0, 1], limits)

    async def never(done: int) -> None:
        await asyncio.Event().wait()

    world.engines[0].step = never
    world.router.set_routes([route(0)])
    running = asyncio.create_task(world.call())
    await until(lambda: world.engines[0].requests)
    world.router.set_routes([route(0), route(1)])
    world.check(await running)
    assert len(world.engines[0].cancelled) >= 1


async def test_a_call_is_held_until_an_engine_admits(make_world: Callable[..., World]) -> None:
    world = make_world([0])
    running = asyncio.create_task(world.call())
    await until(lambda: world.router.held)
    world.router.set_routes([route(0)])
    world.check(await running)
    assert world.router.held == 0


async def test_T39_holding_has_a_deadline(make_world: Callable[..., World]) -> None:
    world = make_world([0], RouterLimits(hold_s=0.02, stall_s=5.0, drain_s=1.0))
    with pytest.raises(CallError, match="No engine admitted") as caught:
        await world.call()
    assert caught.value.retry_after_s
    assert (world.router.transition_errors, world.router.held) == (1, 0)


@pytest.mark.parametrize("silent", [True, False])
async def test_T44_no_engine_alive_is_an_error_and_no_hang(make_world: Callable[..., World], silent: bool) -> None:
    """Processes that answer to nothing are as good as dead ones: the call waits visibly, then fails for a reason."""
    world = make_world([0, 1], RouterLimits(hold_s=0.3, stall_s=0.02, drain_s=1.0, retry_s=0.02))

    async def never(done: int) -> None:
        await asyncio.Event().wait()

    for engine in world.engines.values():
        if silent:
            engine.step = never
        else:
            engine.fail = PeerLost("gone")
    world.router.set_routes([route(0), route(1)])
    running = asyncio.create_task(world.call())
    await until(lambda: world.router.held)
    for engine in world.engines.values():
        engine.step, engine.fail = None, NotReady("still dead")
    with pytest.raises(CallError, match="No engine admitted") as caught:
        await running
    assert caught.value.retry_after_s
    assert world.router.transition_errors == 0, "it was no change of roles"
    assert all(engine.requests for engine in world.engines.values()), "both were asked"


async def test_T14_an_answer_for_another_prompt_is_refused_and_counted(make_world: Callable[..., World]) -> None:
    world = make_world([0])
    world.engines[0].corrupt_prompt = True
    world.router.set_routes([route(0)])
    with pytest.raises(PromptMismatch):
        await world.call()
    assert world.router.prompt_mismatches == 1


async def test_T15_the_prompt_check_holds_after_a_move(make_world: Callable[..., World]) -> None:
    world = make_world([0, 1])
    world.engines[0].fail, world.engines[0].fail_after = PeerLost("gone"), 10
    world.engines[1].corrupt_prompt = True
    world.router.set_routes([route(0)])
    running = asyncio.create_task(world.call())
    await until(lambda: world.engines[0].requests)
    world.router.set_routes([route(1)])
    with pytest.raises(PromptMismatch):
        await running


@pytest.mark.parametrize("ending", [PeerLost("gone"), None])
@pytest.mark.parametrize(("limit", "finish"), [(10, "length"), (100, "stop")])
async def test_a_call_whose_engine_is_lost_behind_the_last_token_is_complete(
    make_world: Callable[..., World], limit: int, finish: str, ending: Exception | None
) -> None:
    world = make_world([0, 1])
    whole = world.engines[0].generate

    async def unfinished(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        async for chunk in whole(request):
            yield msgspec.structs.replace(chunk, finish=None)
        if ending is not None:
            raise ending
        yield GenerateChunk(finish="abort")

    world.engines[0].generate = unfinished  # type: ignore[method-assign]
    world.router.set_routes([route(0)])
    pieces = await world.call(limit=limit)
    assert [token for piece in pieces for token in piece.output_ids] == world.expected[:limit]
    assert [piece.finish for piece in pieces if piece.finish] == [finish]


async def test_a_log_prob_that_is_no_number_is_refused(make_world: Callable[..., World]) -> None:
    world = make_world([0])

    async def broken(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        yield GenerateChunk(output_ids=[5], logprobs=[math.nan], versions=[0], prompt_digest=request.input_ids.digest)

    world.engines[0].generate = broken  # type: ignore[method-assign]
    world.router.set_routes([route(0)])
    with pytest.raises(InvariantViolation, match="cell 0"):
        await world.call()


async def test_leaving_the_iterator_cancels_at_the_engine(make_world: Callable[..., World]) -> None:
    world = make_world([0])
    world.router.set_routes([route(0)])
    stream = world.router.generate("e", PROMPT, 100, world.sampling)
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    await until(lambda: world.engines[0].cancelled)
    assert world.router.running_by_cell() == {}


class Endless(ScriptedEngine):
    """Says the last of an answer, and then either nothing or more."""

    def __init__(self, script: Script, *, talks: bool) -> None:
        super().__init__(script)
        self._talks = talks
        self.let_go = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        said = {"output_ids": [7], "logprobs": [-1.0], "versions": [0]}
        try:
            yield GenerateChunk(**said, finish="length", prompt_digest=request.input_ids.digest)
            while True:
                await (asyncio.sleep(0.01) if self._talks else asyncio.Event().wait())
                yield GenerateChunk(**said, finish="length")
        finally:
            self.let_go.set()


@pytest.mark.parametrize("talks", [True, False])
async def test_an_engine_that_does_not_end_a_whole_answer_is_let_go(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, talks: bool
) -> None:
    monkeypatch.setattr("gyre.proxy.router.engine_call.END_S", 5.0 if talks else 0.05)
    world = make_world([0])
    engine = world.engines[0] = Endless(world.script, talks=talks)
    world.router.set_routes([route(0)])
    assert [piece.finish for piece in await world.call()] == ["length"]
    async with asyncio.timeout(3):
        await engine.let_go.wait()


async def test_T15_calls_move_between_engine_processes(make_world: Callable[..., World], tmp_path: Path) -> None:
    """The same over the real RPC, where one engine's server dies in the middle of an answer."""
    world = make_world([0, 1])
    reached = asyncio.Event()

    async def step(done: int) -> None:
        if done >= 10:
            reached.set()
            await asyncio.Event().wait()

    world.engines[0].step = step
    servers = [await rpc.serve(world.engines[i], Engine, f"unix:{tmp_path}/{i}", "secret") for i in (0, 1)]
    router = Router(lambda address: rpc.connect(Engine, address, "secret"), LIMITS)
    routes = [EngineRoute(cell=i, address=server.address, capacity=4) for i, server in enumerate(servers)]
    router.set_routes(routes[:1])

    async def call() -> list[Piece]:
        return [piece async for piece in router.generate("e", PROMPT, 100, world.sampling)]

    running = asyncio.create_task(call())
    await reached.wait()
    router.set_routes(routes[1:])
    await servers[0].stop()
    world.check(await running)
    await router.close()
    await servers[1].stop()


async def test_an_ended_execution_frees_its_place(make_world: Callable[..., World]) -> None:
    """Balance and memory: the next executions go where the ended one was, and nothing is kept of it."""
    world = make_world([0, 1])
    world.router.set_routes([route(0), route(1)])
    ended = [f"e{i}" for i in range(8)]
    for execution in ended:
        await world.call(execution)
    at_zero = {request.request_id.split("/")[0] for request in world.engines[0].requests}
    assert len(at_zero) == 4
    for execution in at_zero:
        world.router.forget(execution)
    for engine in world.engines.values():
        engine.requests.clear()
    for i in range(4):
        await world.call(f"new{i}")
    assert (len(world.engines[0].requests), len(world.engines[1].requests)) == (4, 0)
    for execution in [*ended, *(f"new{i}" for i in range(4))]:
        world.router.forget(execution)
    assert not world.router._home


async def test_an_abort_that_came_before_the_engine_knew_the_call_is_repeated(make_world: Callable[..., World]) -> None:
    world = make_world([0, 1], RouterLimits(hold_s=5.0, stall_s=5.0, drain_s=30.0, retry_s=0.02))
    world.router.set_routes([route(0)])
    engine = world.engines[0]
    aborts: list[str] = []
    abort, begun, entered = engine.abort, asyncio.Event(), asyncio.Event()

    async def watched(request_id: str) -> None:
        aborts.append(request_id)
        if len(aborts) > 1:
            await abort(request_id)
        begun.set()

    async def step(done: int) -> None:
        entered.set()
        await begun.wait()

    engine.abort, engine.step = watched, step  # type: ignore[method-assign]
    running = asyncio.create_task(world.call())
    await entered.wait()
    world.router.set_routes([route(1)])
    # Without the second abort the drain would wait until it cuts the call.
    report = await world.router.drain(0)
    assert (report.calls_in_flight, report.rerouted, report.failed) == (1, 1, 0)
    assert len(aborts) == 2
    world.check(await running)


async def test_closing_the_router_closes_every_engine_s_connection(proxy_tokenizer: Any) -> None:
    closed: list[str] = []

    class WatchedLink(Link):
        def __init__(self, address: str, engine: ScriptedEngine) -> None:
            super().__init__(engine)
            self._address = address

        async def close(self) -> None:
            closed.append(self._address)

    world = World(proxy_tokenizer, [0, 1])
    world.router._connect = lambda address: WatchedLink(address, world.engines[int(address[4:])])
    for cell in (0, 1):
        world.router.set_routes([route(cell)])
        await world.call(f"e{cell}")
    await world.router.close()
    assert sorted(closed) == ["mem:0", "mem:1"]


def test_capacity_zero_is_no_division_and_the_last_choice() -> None:
    assert place([route(0, capacity=0), route(1, capacity=1)], {0: 1, 1: 0}, "e").cell == 1
    assert place([route(0, capacity=0)], {}, "e").cell == 0
    # A share of an engine that is smaller than one execution weighs as one.
    assert place([route(0, capacity=0), route(1, capacity=1)], {0: 1, 1: 2}, "e").cell == 0
