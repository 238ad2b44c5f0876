"""A running request as the engine sees it: one or more segments at the server, and a gate between them."""

import asyncio
import uuid

from gyre.engines.base import GenerateChunk, GenerateRequest


class ServerCall:
    """`gate` is open while segments may run. `segment` is the id of the one at the server, of fixed length: SGLang
    aborts every request whose id *starts* with the one it is given."""

    def __init__(self, request: GenerateRequest, context: int) -> None:
        self.request = request
        self._most = min(request.max_new_tokens, context - len(request.input_ids))
        self.produced: list[int] = []
        self.aborted = False
        self.gate = asyncio.Event()
        self.segment: str | None = None
        self.chunks: asyncio.Queue[GenerateChunk | None] = asyncio.Queue()
        """None: the end, also after an error."""
        self.ended = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._first = True
        self.routing_from = request.routing_from
        """First position whose experts are still to be told."""

    @property
    def input_ids(self) -> list[int]:
        """Of the next segment."""
        return self.request.input_ids + self.produced

    @property
    def budget(self) -> int:
        """New tokens left, by the request's own limit and by that of the context."""
        return self._most - len(self.produced)

    def begin_segment(self) -> str:
        self.segment = uuid.uuid4().hex
        self._idle.clear()
        return self.segment

    def end_segment(self) -> None:
        self.segment = None
        self._idle.set()

    def end(self) -> None:
        """The last thing that happens to a call."""
        self.chunks.put_nowait(None)
        self.ended.set()

    def put(self, chunk: GenerateChunk) -> None:
        """Only the first chunk of a call tells its prompt and cached tokens; an empty one in the middle is left out."""
        if not chunk.output_ids and chunk.finish is None and chunk.routing is None:
            return
        self.produced += chunk.output_ids
        if self.routing_from is not None and chunk.routing is not None:
            self.routing_from += chunk.routing.positions
        self.chunks.put_nowait(
            GenerateChunk(
                output_ids=chunk.output_ids,
                logprobs=chunk.logprobs,
                versions=chunk.versions,
                finish=chunk.finish,
                # Aborted before its first pass: the ids that waited here are the ids that would have been used.
                prompt_digest=(chunk.prompt_digest or self.request.input_ids.digest) if self._first else None,
                cached_tokens=chunk.cached_tokens if self._first else 0,
                routing=chunk.routing,
            )
        )
        self._first = False

    async def idle(self) -> None:
        """Returns when no segment of this call is at the server."""
        await self._idle.wait()
