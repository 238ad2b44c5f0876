"""Takes the KV of a call from the engine that it leaves to the one where it goes on (docs/transitions.md).

The source offers → the destination pulls and confirms → the source drops the offer. Whatever fails, the answer is the
same: the call goes on without KV and its context is computed anew.
"""

import asyncio
import logging
from collections.abc import Iterator

from gyre.core.errors import GyreError, PeerLost
from gyre.core.tokens import TokenIds
from gyre.engines.base import Engine, KvRef

log = logging.getLogger(__name__)


async def hand_off(
    request_id: str, input_ids: TokenIds, source: Engine, destinations: Iterator[Engine], seconds: float
) -> int:
    """Tokens of `input_ids` whose KV a destination has; 0 when all must be computed anew, with the reason in the log.

    `destinations` gives the engine that goes on with the call, and another one each time the last one was lost. Takes
    at most `seconds`, and as long again when the source does not answer that it dropped its offer."""
    destination = next(destinations, None)
    if destination is None:
        # Until one admits again its weights are likely others, of which this KV is not.
        return _anew(request_id, "no engine admits")
    ref = None
    try:
        async with asyncio.timeout(seconds):
            ref = await source.export_kv(input_ids)
            if ref is None:
                return _anew(request_id, "the source offers none")
            while destination is not None:
                try:
                    return await destination.import_kv(ref) or _anew(request_id, "the destination has no free memory")
                except PeerLost:
                    destination = next(destinations, None)
            return _anew(request_id, "no destination was left")
    except TimeoutError:
        return _anew(request_id, f"it did not arrive within {seconds:g} s")
    except GyreError as error:
        return _anew(request_id, str(error))
    finally:
        if ref is not None:
            await _drop(source, ref, seconds)


async def _drop(source: Engine, ref: KvRef, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await source.drop_kv(ref)
    except (GyreError, TimeoutError) as error:
        # The source drops what is left of it when it releases its memory.
        log.warning("an engine did not drop the KV that it offered: %s", error or f"no answer within {seconds:g} s")


def _anew(request_id: str, why: str) -> int:
    log.info("%s goes on elsewhere without its KV: %s", request_id, why)
    return 0
