"""`Publication` by broadcast: the engine's weight sender and the ranks of its server in a process group of their own.

Every step is one call on the sender and one on the server, made together: neither returns without the other. When one
of them fails, both leave the group and the server's update session is closed; the next update builds a new group.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from functools import partial
from typing import Any

from gyre.core.errors import GyreError, PeerLost
from gyre.engines.sglang.buckets import Bucket
from gyre.engines.sglang.client import Refused, SglangClient
from gyre.engines.sglang.publication import Load
from gyre.engines.sglang.sender import Meeting, WeightSender
from gyre.engines.sglang.weights import ModelDirs
from gyre.transport.base import WeightRef


class Broadcast:
    def __init__(
        self, client: SglangClient, models: ModelDirs, sender: WeightSender, ranks: int, timeout_s: float
    ) -> None:
        self._client = client
        self._models = models
        self._sender = sender
        self._ranks = ranks
        self._timeout_s = timeout_s
        """Of every step, for both sides."""
        self._group: str | None = None
        """The group that sender and server share."""
        self._left_open = False
        """Whether an update began and did not end."""

    @contextlib.asynccontextmanager
    async def offered(self, ref: WeightRef) -> AsyncIterator[Load]:
        if self._left_open:
            await self._leave()
        buckets: list[Bucket]
        what = f"the weight sender did not read version {ref.version}"
        (buckets,) = await self._together(what, self._sender.plan(ref))
        found = {name: shape for bucket in buckets for name, shape in zip(bucket.names, bucket.shapes, strict=True)}
        self._models.require_fit(ref.version, found)
        yield partial(self._load, ref.version, buckets)

    async def _load(self, version: int, buckets: list[Bucket]) -> None:
        self._left_open = True
        try:
            await self._send(version, buckets)
        except GyreError:
            # Raises PeerLost instead when one side does not even answer this.
            await self._leave()
            raise
        self._left_open = False

    async def _send(self, version: int, buckets: list[Bucket]) -> None:
        group = self._group = self._group or await self._meet()
        await self._client.post("/begin_weight_update", {})
        for index, bucket in enumerate(buckets):
            last = index == len(buckets) - 1
            body = {
                "names": bucket.names,
                "dtypes": bucket.dtypes,
                "shapes": bucket.shapes,
                "group_name": group,
                "load_format": "flattened_bucket",
                # Only the last one makes it this version.
                "weight_version": str(version) if last else None,
                "flush_cache": last,
            }
            await self._together(
                f"SGLang and its weight sender did not pass on bucket {index + 1} of {len(buckets)}",
                self._sender.send(index),
                self._client.post("/update_weights_from_distributed", body),
            )
        await self._client.post("/end_weight_update", {})

    async def _meet(self) -> str:
        meeting: Meeting
        (meeting,) = await self._together("the weight sender opened no group", self._sender.open(self._ranks))
        body = {
            "master_address": meeting.host,
            "master_port": meeting.port,
            "rank_offset": 1,
            "world_size": 1 + self._ranks,
            "group_name": meeting.group,
            "backend": meeting.backend,
        }
        # Whoever fails to meet, the other side may have the group.
        self._group = meeting.group
        await self._together(
            "SGLang and its weight sender did not meet",
            self._sender.join(),
            self._client.post("/init_weights_update_group", body),
        )
        return meeting.group

    async def _leave(self) -> None:
        await self._together(
            "SGLang and its weight sender did not leave their group", self._sender.close(), self._tidy(self._group)
        )
        self._group = None
        self._left_open = False

    async def _tidy(self, group: str | None) -> None:
        # Refused: there was no session, or no group, to end.
        with contextlib.suppress(Refused):
            await self._client.post("/end_weight_update", {})
        if group is not None:
            with contextlib.suppress(Refused):
                await self._client.post("/destroy_weights_update_group", {"group_name": group})

    async def _together(self, what: str, *sides: Awaitable[Any]) -> list[Any]:
        """The results of both sides. The first failure ends the wait for the other one."""
        tasks = [asyncio.ensure_future(side) for side in sides]
        try:
            async with asyncio.timeout(self._timeout_s):
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        except TimeoutError:
            raise PeerLost(f"{what} within {self._timeout_s:g} s") from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()
        return [task.result() for task in tasks]
