"""What every engine asks of a request before it runs. Pure."""

from collections.abc import Container

from gyre.core.errors import GyreError, NotReady
from gyre.engines.base import GenerateRequest, PauseMode


def require_open(released: bool, version: int, paused: PauseMode | None) -> None:
    """Raises NotReady while the engine admits nothing."""
    if released:
        raise NotReady("the engine's memory is released; restore it and update its weights first")
    if version < 0:
        raise NotReady("the engine has no weights yet; update_weights first")
    if paused is PauseMode.ABORT:
        raise NotReady("the engine is paused and admits nothing; resume it or use another one")


def require_fit(
    request: GenerateRequest, running: Container[str], limit: int, vocabulary: int, tells_routing: bool
) -> None:
    """Raises GyreError for a request that this engine can never run. `running`: ids of running requests; `limit`:
    longest context in tokens."""
    sampling, length = request.sampling, len(request.input_ids)
    if request.request_id in running:
        raise GyreError(f"request id {request.request_id} is already running; ids are unique while running")
    if not sampling.temperature > 0.0:
        raise GyreError(f"temperature = {sampling.temperature} is refused: it must be positive")
    if length == 0 or request.max_new_tokens < 1:
        raise GyreError(f"request of {length} prompt and {request.max_new_tokens} new tokens: both must be positive")
    if length >= limit:
        raise GyreError(f"prompt of {length} tokens does not fit the engine's context of {limit}")
    if request.routing_from is not None and not tells_routing:
        raise GyreError("the engine was not started to tell experts: set replay_routing, or do not ask for them")
    if request.routing_from is not None and not 0 <= request.routing_from < length:
        raise GyreError(f"experts from position {request.routing_from} of a prompt of {length} tokens")
    if not 0 <= min(request.input_ids) <= max(request.input_ids) < vocabulary:
        raise GyreError(f"prompt ids outside the vocabulary of {vocabulary}")
