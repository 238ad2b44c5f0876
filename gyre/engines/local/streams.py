"""The tokens of one running request on their way to its caller."""

import asyncio
import contextlib

from gyre.core.expert_routing import ExpertRouting, joined
from gyre.core.records import FinishReason
from gyre.core.tokens import TokenIds
from gyre.engines.base import GenerateChunk
from gyre.engines.local.batching import Produced

CHUNK_INTERVAL_S = 0.1
"""Tokens produced within this time travel together: one RPC message per token would cost more than the forward pass of
a small model. The first token and the end of a request do not wait."""


class RequestStream:
    """Collects what the generation thread produced; `next_chunk` takes it. Lives on one event loop."""

    def __init__(self, input_ids: TokenIds, stop_token_ids: list[int]) -> None:
        self.finish: FinishReason | None = None
        self.error: str | None = None
        self._accepted = input_ids
        self._stop = frozenset(stop_token_ids)
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._routing: list[ExpertRouting] = []
        self._prompt_digest: bytes | None = None
        self._cached = 0
        self._first = True
        self._some = asyncio.Event()
        self._ended = asyncio.Event()

    def put(self, produced: Produced) -> None:
        if self._ended.is_set():
            return
        if produced.prompt_ids:
            self._prompt_digest = TokenIds(produced.prompt_ids).digest
            self._cached = produced.cached_tokens
        self._ids += produced.output_ids
        self._logprobs += produced.logprobs
        self._versions += [produced.version] * len(produced.output_ids)
        if produced.routing is not None:
            self._routing.append(produced.routing)
        if produced.error is not None:
            self.fail(produced.error)
        elif produced.finished:
            self.end("stop" if self._ids and self._ids[-1] in self._stop else "length")
        self._some.set()

    def end(self, finish: FinishReason) -> None:
        """No more tokens; what is here is still delivered."""
        if not self._ended.is_set():
            if self._prompt_digest is None:
                # Aborted before its first pass: the ids that waited here are the ids that would have been used.
                self._prompt_digest = self._accepted.digest
            self.finish = finish
            self._ended.set()
            self._some.set()

    def fail(self, error: str) -> None:
        if not self._ended.is_set():
            self.error = error
            self._ended.set()
            self._some.set()

    async def next_chunk(self) -> GenerateChunk:
        """Waits for tokens or the end. The chunk with `finish` is the last one."""
        await self._some.wait()
        if not self._first and not self._ended.is_set():
            # Let more tokens join this chunk, but deliver the end at once.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHUNK_INTERVAL_S):
                    await self._ended.wait()
        chunk = GenerateChunk(
            output_ids=self._ids,
            logprobs=self._logprobs,
            versions=self._versions,
            finish=self.finish,
            prompt_digest=self._prompt_digest if self._first else None,
            cached_tokens=self._cached if self._first else 0,
            routing=joined(self._routing) if self._routing else None,
        )
        self._ids, self._logprobs, self._versions, self._routing, self._first = [], [], [], [], False
        if not self._ended.is_set():
            self._some.clear()
        return chunk
