"""How a published version gets into the server: what both ways have in common, and the one through a file.

A way first looks at the snapshot while the server is not touched, and refuses what cannot fit. Then the engine holds
its requests and calls what it was given.
"""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Protocol

from gyre.engines.sglang.client import SglangClient
from gyre.engines.sglang.weights import ModelDirs
from gyre.transport.base import WeightRef, WeightTransport

Load = Callable[[], Awaitable[None]]
"""Puts the weights into the server, which runs nothing, and empties its cache. Raises Refused, WeightsUnavailable,
PeerLost; what the server holds then is not known."""


class WeightUpdate(Protocol):
    def offered(self, ref: WeightRef) -> contextlib.AbstractAsyncContextManager[Load]:
        """The version, verified, for as long as the context lives. Raises WeightsUnavailable when the snapshot is
        gone, damaged or of another model, PeerLost."""
        ...


class FromDisk:
    """`WeightUpdate`: the server loads the snapshot's file in place, with SGLang's own loader on every rank."""

    def __init__(self, client: SglangClient, models: ModelDirs, transport: WeightTransport) -> None:
        self._client = client
        self._models = models
        self._transport = transport

    @contextlib.asynccontextmanager
    async def offered(self, ref: WeightRef) -> AsyncIterator[Load]:
        view = await asyncio.to_thread(self._models.view, ref, self._transport)
        try:
            yield partial(self._load, ref.version, str(view))
        finally:
            await asyncio.to_thread(shutil.rmtree, view)

    async def _load(self, version: int, path: str) -> None:
        body = {"model_path": path, "load_format": "auto", "weight_version": str(version), "flush_cache": True}
        await self._client.post("/update_weights_from_disk", body)
