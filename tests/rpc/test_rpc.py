import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import msgspec
import pytest

from gyre.core.errors import GyreError, NotReady, PeerLost, PromptMismatch
from gyre.rpc import Connection, Server, connect, serve


class Item(msgspec.Struct, frozen=True):
    n: int
    blob: list[float] = []


class Service(Protocol):
    async def double(self, item: Item) -> Item: ...
    async def nothing(self) -> None: ...
    def ticks(self, n: int) -> AsyncIterator[Item]: ...
    def failing(self) -> AsyncIterator[int]: ...


class Implementation:
    def __init__(self) -> None:
        self.stream_closed = asyncio.Event()

    async def double(self, item: Item) -> Item:
        if item.n < 0:
            raise ValueError("negative")
        if item.n == 0:
            raise NotReady("é" * 20_000)
        return Item(item.n * 2, item.blob * 2)

    async def nothing(self) -> None:
        return None

    async def ticks(self, n: int) -> AsyncIterator[Item]:
        try:
            for i in range(n):
                yield Item(i)
            await asyncio.Event().wait()
        finally:
            self.stream_closed.set()

    async def failing(self) -> AsyncIterator[int]:
        yield 1
        raise PromptMismatch("other ids")


async def start(tmp_path: Path) -> tuple[Implementation, Server, Connection[Service]]:
    implementation = Implementation()
    server = await serve(implementation, Service, f"unix:{tmp_path}/s.sock", "secret")
    return implementation, server, connect(Service, server.address, "secret")


async def test_values_of_any_size_cross(tmp_path: Path) -> None:
    _, server, connection = await start(tmp_path)
    blob = [0.5] * 1_000_000
    assert await connection.stub.double(Item(4, blob)) == Item(8, blob * 2)
    assert await connection.stub.nothing() is None
    await connection.close()
    await server.stop()


async def test_closing_a_stream_cancels_the_other_side(tmp_path: Path) -> None:
    implementation, server, connection = await start(tmp_path)
    stream = connection.stub.ticks(2)
    assert [(await anext(stream)).n for _ in range(2)] == [0, 1]
    await stream.aclose()  # type: ignore[attr-defined]
    async with asyncio.timeout(5):
        await implementation.stream_closed.wait()
    await connection.close()
    await server.stop()


async def test_errors_keep_their_type_and_unexpected_ones_their_text(tmp_path: Path) -> None:
    _, server, connection = await start(tmp_path)
    stream = connection.stub.failing()
    assert await anext(stream) == 1
    with pytest.raises(PromptMismatch, match="other ids"):
        await anext(stream)
    with pytest.raises(GyreError, match="negative"):
        await connection.stub.double(Item(-1))
    with pytest.raises(GyreError, match="Expected `int`, got `str`"):
        await connection.stub.double(Item("x"))  # type: ignore[arg-type]
    await connection.close()
    await server.stop()


async def test_long_errors_keep_their_type_and_text(tmp_path: Path) -> None:
    _, server, connection = await start(tmp_path)
    with pytest.raises(NotReady, match=r"é{20000}"):
        await connection.stub.double(Item(0))
    await connection.close()
    await server.stop()


async def test_a_server_that_stops_mid_stream_is_peer_lost(tmp_path: Path) -> None:
    _, server, connection = await start(tmp_path)
    stream = connection.stub.ticks(1)
    await anext(stream)
    await server.stop()
    with pytest.raises(PeerLost):
        await anext(stream)
    await connection.close()


async def test_a_service_method_must_be_async() -> None:
    class Wrong(Protocol):
        def f(self) -> int: ...

    with pytest.raises(TypeError, match="async def"):
        connect(Wrong, "unix:/nowhere", "")
