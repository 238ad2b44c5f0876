"""The parts of SGLang's `/generate` stream that Gyre reads, and how they become chunks."""

import base64

import msgspec
import numpy as np

from gyre.core.errors import GyreError, InvariantViolation, PromptMismatch
from gyre.core.expert_routing import ExpertRouting, id_type
from gyre.core.records import FinishReason
from gyre.core.tokens import TokenIds
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
    weight_version: str = ""
    """Of the server when it sent the event."""
    weight_versions: list[Span] = []
    """Last event only."""
    cached_tokens: int = 0
    routed_experts: str | None = None
    """Last event only, base64 of int32 [positions from the start that was asked for, layers, k]."""


class Event(msgspec.Struct):
    """One `data:` line. Everything is cumulative."""

    meta_info: MetaInfo = msgspec.field(default_factory=MetaInfo)
    prompt_token_ids: list[int] | None = None
    error: dict[str, object] | None = None


def read_experts(told: str, model: ExpertRouting) -> ExpertRouting:
    """`model` is of the model's shape, without positions. Raises InvariantViolation when what was told is not."""
    try:
        choices = np.frombuffer(base64.b64decode(told), "<i4").reshape(-1, model.layers, model.chosen)
    except ValueError as error:
        raise InvariantViolation(f"SGLang told experts of another shape than the model's: {error}") from error
    if choices.size and not 0 <= choices.min() <= choices.max() < model.experts:
        raise InvariantViolation(f"SGLang told experts outside the {model.experts} of the model")
    return model.replaced(choices.astype(id_type(model.experts, model.chosen)))


class SegmentReader:
    """Turns the cumulative events of one segment into chunks of new tokens.

    A segment is one request at the server, whole under one version: the engine lets none live through an update. So
    every token's version is known when it arrives, and the spans in the last event must say the same."""

    def __init__(self, input_ids: list[int], version: int, model: ExpertRouting | None = None) -> None:
        """`model`: the shape of the experts that were asked for, without positions."""
        self._input_ids = input_ids
        self._model = model
        self._version = version
        self._count = 0
        self._cached: int | None = None

    def read(self, event: Event) -> GenerateChunk:
        """Raises GyreError when the event is an error, PromptMismatch, InvariantViolation for a foreign version."""
        if event.error is not None:
            raise GyreError(f"SGLang failed the request: {event.error.get('message', event.error)}")
        meta = event.meta_info
        new = meta.output_token_logprobs[self._count :]
        finish = self._finish(meta)
        if new and event.prompt_token_ids != self._input_ids:
            raise PromptMismatch("SGLang answered for other prompt ids than the ones sent; its tokens are dropped")
        versions = {span.version for span in meta.weight_versions if span.end > span.start}
        versions |= {meta.weight_version} if new else set()
        if versions - {str(self._version)}:
            raise InvariantViolation(f"SGLang sampled with versions {sorted(versions)} while it held {self._version}")
        first = self._cached is None
        self._cached = meta.cached_tokens
        self._count += len(new)
        return GenerateChunk(
            output_ids=[token for _, token, _ in new],
            logprobs=[logprob for logprob, _, _ in new],
            versions=[self._version] * len(new),
            finish=finish,
            prompt_digest=TokenIds(event.prompt_token_ids).digest if first and event.prompt_token_ids else None,
            cached_tokens=meta.cached_tokens if first else 0,
            routing=read_experts(meta.routed_experts, self._model) if self._model and meta.routed_experts else None,
        )

    def _finish(self, meta: MetaInfo) -> FinishReason | None:
        reason = meta.finish_reason
        if reason is None:
            return None
        if reason.type not in FINISH:
            raise GyreError(f"SGLang ended the request with unknown reason {reason.type!r}: {reason.message}")
        return FINISH[reason.type]
