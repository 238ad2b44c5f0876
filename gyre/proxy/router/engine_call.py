"""One engine call. A model call that is moved between engines has several engine_calls, one after the other."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from contextlib import aclosing

from gyre.core.errors import GyreError, InvariantViolation, PeerLost, PromptMismatch
from gyre.engines.base import Engine, GenerateChunk, GenerateRequest

log = logging.getLogger(__name__)

END_S = 10.0
"""How long an engine may take to end the stream after the last chunk of an answer; then it is ended from here."""

_Item = GenerateChunk | GyreError | None


class EngineCall:
    """Runs one `generate` in a task, so that it can be cut from outside without losing what was already received."""

    def __init__(self, cell: int, engine: Engine, request: GenerateRequest) -> None:
        self.cell = cell
        self.request = request
        self.leaving = False
        """The engine was asked to let go of it."""
        self.moved = False
        """It ended before the answer was complete, and the call goes on elsewhere."""
        self.aborted = False
        """The engine itself ended it, so it lives and has the KV."""
        self.kv_tokens = 0
        """Tokens whose KV went along to where the call goes on."""
        self.engine = engine
        self._whole = False
        """The engine has said the last of it and ends the stream itself, which costs less than to cancel it."""
        self._received: asyncio.Queue[_Item] = asyncio.Queue()
        self._task = asyncio.create_task(self._receive())

    async def chunks(self, stall_s: float) -> AsyncIterator[GenerateChunk]:
        """Chunks until one carries `finish`, or until the engine call is cut.

        Raises PeerLost when the engine is gone or delivers nothing for `stall_s`, NotReady when it admits nothing,
        PromptMismatch when it answers for another prompt, InvariantViolation when a chunk makes no sense.
        """
        first = True
        while True:
            try:
                async with asyncio.timeout(stall_s):
                    item = await self._received.get()
            except TimeoutError:
                raise PeerLost(f"engine of cell {self.cell} produced nothing for {stall_s:g} s") from None
            if item is None:
                await asyncio.wait({self._task})
                if not self._task.cancelled() and (unexpected := self._task.exception()):
                    raise unexpected
                return
            if isinstance(item, GyreError):
                raise item
            if first and item.prompt_digest != self.request.input_ids.digest:
                raise PromptMismatch(f"engine of cell {self.cell} answered for other prompt ids than the ones sent")
            if not len(item.output_ids) == len(item.logprobs) == len(item.versions):
                raise InvariantViolation(f"engine of cell {self.cell} sent a chunk with lists of unequal length")
            if not all(map(math.isfinite, item.logprobs)):
                raise InvariantViolation(f"engine of cell {self.cell} sent a log-prob that is not finite")
            first = False
            self.aborted = item.finish == "abort"
            yield item
            if item.finish is not None:
                return

    async def leave(self) -> None:
        """Asks the engine to end the request now and to deliver what it has."""
        self.leaving = True
        await self.engine.abort(self.request.request_id)

    def cut(self) -> None:
        """Ends the engine call from this side; what was received stays readable."""
        if not self._whole:
            self._task.cancel()

    async def _receive(self) -> None:
        end = asyncio.timeout(None)
        try:
            async with end, aclosing(self.engine.generate(self.request)) as stream:  # type: ignore[type-var]
                async for chunk in stream:
                    if self._whole:
                        log.warning("engine of cell %d went on after the end of an answer: cancelled", self.cell)
                        break
                    self._received.put_nowait(chunk)
                    if chunk.finish is not None:
                        self._whole = True
                        end.reschedule(asyncio.get_running_loop().time() + END_S)
        except GyreError as error:
            self._received.put_nowait(error)
        except TimeoutError:
            if not end.expired():
                raise
            log.warning("engine of cell %d left a finished answer open for %g s: cancelled", self.cell, END_S)
        finally:
            self._received.put_nowait(None)
