"""The parts of SGLang's `/generate` stream that Gyre reads, and how they become chunks."""

import msgspec

from gyre.core.errors import GyreError
from gyre.core.records import FinishReason
from gyre.engines.base import GenerateChunk

FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class Finish(msgspec.Struct):
    type: str
    message: str | None = None


class Span(msgspec.Struct):
    """Output tokens [start, end) come from this version."""

    version: str
    start: int
    end: int


class MetaInfo(msgspec.Struct):
    finish_reason: Finish | None = None
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    """All so far: log-probability, token id, text."""
    weight_versions: list[Span] = []
    cached_tokens: int = 0


class Event(msgspec.Struct):
    """One `data:` line. Everything is cumulative."""

    meta_info: MetaInfo = msgspec.field(default_factory=MetaInfo)
    prompt_token_ids: list[int] | None = None
    error: dict[str, object] | None = None


_decoder = msgspec.json.Decoder(Event)


class ChunkReader:
    """Turns the cumulative events of one request into chunks of new tokens."""

    def __init__(self) -> None:
        self._count = 0
        self._first = True

    def read(self, data: str) -> GenerateChunk:
        """Raises GyreError when the event is an error or its parts disagree."""
        event = _decoder.decode(data)
        if event.error is not None:
            raise GyreError(f"SGLang failed the request: {event.error.get('message', event.error)}")
        meta = event.meta_info
        new = meta.output_token_logprobs[self._count :]
        versions = [int(s.version) for s in meta.weight_versions for _ in range(max(s.start, self._count), s.end)]
        if len(versions) != len(new):
            raise GyreError(f"SGLang sent {len(new)} tokens with {len(versions)} weight versions; they must be equal")
        finish = meta.finish_reason
        if finish is not None and finish.type not in FINISH:
            raise GyreError(f"SGLang ended the request with unknown reason {finish.type!r}: {finish.message}")
        chunk = GenerateChunk(
            output_ids=[token for _, token, _ in new],
            logprobs=[logprob for logprob, _, _ in new],
            versions=versions,
            finish=None if finish is None else FINISH[finish.type],
            prompt_ids=event.prompt_token_ids if self._first else None,
            cached_tokens=meta.cached_tokens if self._first else 0,
        )
        self._count += len(new)
        self._first = False
        return chunk
