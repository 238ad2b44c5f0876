"""The rollout engine as Gyre sees it: tokens in, tokens out. `local` and `sglang` pass the same contract tests.

The vocabulary is SGLang's. An engine never sees text, templates or executions; it knows request ids and versions.
"""

from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Protocol

import msgspec

from gyre.core.records import FinishReason
from gyre.core.tokens import TokenIds
from gyre.transport.base import WeightRef


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's sampling distribution; the harness cannot change it."""

    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: list[int] = []


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    """Unique per engine while running; a rerouted call gets a new one."""
    input_ids: TokenIds
    """Full prompt, [T_in]."""
    max_new_tokens: int
    sampling: Sampling


class GenerateChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Newly produced tokens; the last chunk carries `finish`. The three lists have equal length [T_new]."""

    output_ids: list[int] = []
    logprobs: list[float] = []
    """Log-probability of each token under the distribution it was sampled from."""
    versions: list[int] = []
    """Policy version of the weights that produced each token."""
    finish: FinishReason | None = None
    prompt_ids: TokenIds | None = None
    """First chunk only: the prompt ids that the engine actually used, for the caller's equality check."""
    cached_tokens: int = 0
    """First chunk only: prompt tokens served from the prefix cache."""


class PauseMode(StrEnum):
    ABORT = "abort"
    """Running requests end with finish "abort" and keep their partial output."""
    IN_PLACE = "in_place"
    """Running requests stay and continue after `resume`, with their KV."""


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    """-1 before the first weights."""
    running: int
    paused: bool
    released: bool
    generated_tokens: int
    """Total since start; liveness is progress of this number while `running` > 0."""
    cached_tokens: int
    """Total prompt tokens served from the prefix cache since start."""
    weights_checksum: str
    kv_blocks_in_use: int = 0


class Engine(Protocol):
    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Streams tokens as they are produced. Closing the stream cancels the request. Raises NotReady when the engine
        has no weights, is released, or admits nothing."""
        ...

    async def abort(self, request_id: str) -> None:
        """Ends a request ("" = all) with finish "abort"; tokens produced so far are delivered. Unknown ids are ignored:
        the request may just have finished."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Returns when no forward pass runs and none starts until `resume`."""
        ...

    async def resume(self) -> None: ...

    async def update_weights(self, ref: WeightRef) -> None:
        """Loads a published version and drops all KV: requests that are paused in place go on under it after their
        context was computed anew, so a token's log-prob depends on one version only, that of its stamp.
        On error the old weights and version stay whole and the error is raised."""
        ...

    async def release(self) -> None:
        """Frees weights and KV memory (no request may be running); the process stays."""
        ...

    async def restore(self) -> None:
        """Allocates again after `release`; the engine has no weights until `update_weights`."""
        ...

    async def status(self) -> EngineStatus: ...
