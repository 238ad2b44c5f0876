"""KV of calls that move: it goes along while the drain waits, and nothing that goes wrong with it stops a call."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from proxy_fakes import Link, Script, ScriptedEngine, until

from gyre.core.errors import GyreError, PeerLost, WeightsUnavailable
from gyre.core.tokens import TokenIds
from gyre.engines.base import Sampling
from gyre.proxy.base import DrainReport, EngineRoute
from gyre.proxy.router.router import Piece, Router, RouterLimits

LIMITS = RouterLimits(hold_s=5.0, stall_s=5.0, drain_s=2.0, handoff_s=2.0, retry_s=0.02)
PROMPT = TokenIds([1, 2, 3, 4])
DONE = 10
"""Tokens that the source has produced when it leaves."""


def route(cell: int) -> EngineRoute:
    return EngineRoute(cell=cell, address=f"mem:{cell}", capacity=4)


def raising(error: Exception) -> Callable[[], Awaitable[None]]:
    async def fail() -> None:
        raise error

    return fail


async def hang() -> None:
    await asyncio.Event().wait()


class World:
    """Calls that run on cell 0 and have `DONE` tokens; all engines have the same weights."""

    def __init__(self, tokenizer: Any, cells: list[int], limits: RouterLimits = LIMITS) -> None:
        script = Script(tokenizer, lambda prompt: "0123456789" * 4)
        self.engines = {cell: ScriptedEngine(script, version=7) for cell in cells}
        self.router = Router(lambda address: Link(self.engines[int(address[4:])]), limits)
        self.sampling = Sampling(stop_token_ids=[tokenizer.convert_tokens_to_ids("<|im_end|>")])
        self.expected = [*tokenizer.encode("0123456789" * 4), self.sampling.stop_token_ids[0]]
        self.waiting = 0
        self.engines[0].step = self._step

    async def _step(self, done: int) -> None:
        if done >= DONE:
            self.waiting += 1
            await hang()

    async def start(self, calls: int = 1) -> list[asyncio.Task[list[Piece]]]:
        self.router.set_routes([route(0)])
        running = [asyncio.create_task(self._call(f"e{i}")) for i in range(calls)]
        await until(lambda: self.waiting == calls)
        return running

    async def _call(self, execution: str) -> list[Piece]:
        return [piece async for piece in self.router.generate(execution, PROMPT, 100, self.sampling)]

    async def leave(self, *to: int) -> DrainReport:
        self.router.set_routes([route(cell) for cell in to])
        report = await self.router.drain(0)
        assert self.engines[0].offers == [], "what was offered is dropped"
        return report

    def check(self, pieces: list[Piece], cached: int) -> None:
        """The whole answer; its second engine_call found so many tokens in the prefix cache."""
        assert [token for piece in pieces for token in piece.output_ids] == self.expected
        first_after = next(piece for piece in pieces if piece.cell != 0)
        assert first_after.cached_tokens == cached


@pytest.fixture
def make_world(proxy_tokenizer: Any) -> Callable[..., World]:
    return lambda *args: World(proxy_tokenizer, *args)


async def test_a_moved_call_takes_its_kv_along(make_world: Callable[..., World]) -> None:
    world = make_world([0, 1])
    (running,) = await world.start()
    report = await world.leave(1)
    assert (report.rerouted, report.with_kv, report.failed) == (1, 1, 0)
    world.check(await running, cached=len(PROMPT) + DONE)
    assert world.engines[1].taken[0].input_ids == PROMPT + world.expected[:DONE]


async def test_the_drain_waits_for_the_kv(make_world: Callable[..., World]) -> None:
    world = make_world([0, 1])
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def pull() -> None:
        reached.set()
        await go_on.wait()

    world.engines[1].on_import = pull
    (running,) = await world.start()
    leaving = asyncio.create_task(world.leave(1))
    await reached.wait()
    assert (world.router.running_by_cell(), leaving.done(), world.engines[1].requests) == ({0: 1}, False, [])
    go_on.set()
    assert (await leaving).with_kv == 1
    world.check(await running, cached=len(PROMPT) + DONE)


async def test_an_engine_that_leaves_while_it_pulls_hands_on_nothing(make_world: Callable[..., World]) -> None:
    """The destination is drained itself before the call runs there: the call goes on at a third engine."""
    world = make_world([0, 1, 2])

    async def leave_too() -> None:
        world.router.set_routes([route(2)])

    world.engines[1].on_import = leave_too
    (running,) = await world.start()
    assert (await world.leave(1)).rerouted == 1
    world.check(await running, cached=0)
    assert world.engines[1].requests == []


async def test_many_calls_move_to_two_engines_at_once(make_world: Callable[..., World]) -> None:
    world = make_world([0, 1, 2])
    locks = {cell: asyncio.Lock() for cell in world.engines}
    for cell, engine in world.engines.items():
        # As the local engine: one transfer at a time, in or out.
        async def one_at_a_time(lock: asyncio.Lock = locks[cell]) -> None:
            async with lock:
                await asyncio.sleep(0)

        engine.on_export = engine.on_import = one_at_a_time
    running = await world.start(calls=12)
    report = await world.leave(1, 2)
    assert (report.rerouted, report.with_kv) == (12, 12)
    for pieces in await asyncio.gather(*running):
        world.check(pieces, cached=len(PROMPT) + DONE)
    assert all(world.engines[cell].taken for cell in (1, 2))


async def test_weights_published_between_offer_and_pull_make_the_kv_useless(make_world: Callable[..., World]) -> None:
    world = make_world([0, 1])

    async def publication() -> None:
        world.engines[1].version = 8

    world.engines[1].on_import = publication
    (running,) = await world.start()
    assert (await world.leave(1)).with_kv == 0
    pieces = await running
    world.check(pieces, cached=0)
    assert {version for piece in pieces if piece.cell == 1 for version in piece.versions} == {8}


async def test_a_destination_lost_while_it_pulls_is_replaced_by_another(make_world: Callable[..., World]) -> None:
    world = make_world([0, 1, 2])
    # Cell 2 is asked first.
    world.engines[2].on_import = raising(PeerLost("gone"))
    (running,) = await world.start()
    assert (await world.leave(1, 2)).with_kv == 1
    world.check(await running, cached=len(PROMPT) + DONE)
    assert len(world.engines[1].taken) == 1
    assert world.engines[2].requests == []


@pytest.mark.parametrize("error", [PeerLost("gone"), GyreError("another layout"), WeightsUnavailable("damaged")])
@pytest.mark.parametrize("side", ["export", "import"])
async def test_a_failed_transfer_is_computed_anew(
    make_world: Callable[..., World], caplog: pytest.LogCaptureFixture, side: str, error: GyreError
) -> None:
    caplog.set_level("INFO")
    world = make_world([0, 1])
    if side == "export":
        world.engines[0].on_export = raising(error)
    else:
        world.engines[1].on_import = raising(error)
    (running,) = await world.start()
    report = await world.leave(1)
    assert (report.rerouted, report.with_kv, report.failed) == (1, 0, 0)
    world.check(await running, cached=0)
    why = "no destination was left" if side == "import" and isinstance(error, PeerLost) else str(error)
    assert f"e0/0 goes on elsewhere without its KV: {why}" in caplog.messages


async def test_an_engine_without_kv_to_offer_costs_nothing(make_world: Callable[..., World]) -> None:
    world = make_world([0, 1])
    world.engines[0].kv = False
    (running,) = await world.start()
    assert (await world.leave(1)).with_kv == 0
    world.check(await running, cached=0)


@pytest.mark.parametrize("side", ["export", "import"])
async def test_a_transfer_has_a_deadline(make_world: Callable[..., World], side: str) -> None:
    world = make_world([0, 1], RouterLimits(hold_s=5.0, stall_s=5.0, drain_s=2.0, handoff_s=0.02, retry_s=0.02))
    if side == "export":
        world.engines[0].on_export = hang
    else:
        world.engines[1].on_import = hang
    (running,) = await world.start()
    assert (await world.leave(1)).with_kv == 0
    world.check(await running, cached=0)


async def test_without_a_destination_the_drain_does_not_wait(make_world: Callable[..., World]) -> None:
    """All cells train: the call is held, and the weights that come back are others."""
    world = make_world([0])
    world.engines[0].on_export = hang
    (running,) = await world.start()
    report = await world.leave()
    assert (report.rerouted, report.with_kv) == (1, 0)
    await until(lambda: world.router.held)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_client_that_leaves_during_the_transfer_leaves_no_offer(make_world: Callable[..., World]) -> None:
    world = make_world([0, 1])
    reached = asyncio.Event()

    async def pull() -> None:
        reached.set()
        await hang()

    world.engines[1].on_import = pull
    (running,) = await world.start()
    leaving = asyncio.create_task(world.leave(1))
    await reached.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await leaving
    assert world.router.running_by_cell() == {}


async def test_a_leg_that_had_to_be_cut_is_not_asked_for_kv(make_world: Callable[..., World]) -> None:
    """An engine that does not even end a request has no time for a transfer."""
    world = make_world([0, 1], RouterLimits(hold_s=5.0, stall_s=5.0, drain_s=0.02, handoff_s=2.0, retry_s=0.02))
    source = world.engines[0]

    async def deaf(request_id: str) -> None: ...

    source.abort = deaf  # type: ignore[method-assign]
    asked: list[None] = []

    async def export() -> None:
        asked.append(None)

    source.on_export = export
    (running,) = await world.start()
    report = await world.leave(1)
    assert (report.rerouted, report.with_kv) == (1, 0)
    world.check(await running, cached=0)
    assert asked == []
