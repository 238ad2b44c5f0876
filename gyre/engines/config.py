"""What every engine needs to know before it starts, whatever its kind."""

import msgspec

from gyre.transport.base import WeightRef
from gyre.transport.section import ShmSection, TransportSection


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model_dir: str
    """Hugging Face directory that says what the model is. Its weights come through the transport."""
    transport_root: str
    """Directory in shared memory under which every process of the run publishes."""
    transport: TransportSection = ShmSection()
    weights: WeightRef | None = None
    """Published weights to start with; without them the engine is NotReady until the first `update_weights`."""
    max_context: int
    """Prompt plus output; a generation that reaches it ends with finish "length"."""
    seed: int
    """Of the sampler. Outputs also depend on how requests are batched, so they repeat only for the same arrivals."""
    replay_routing: bool = False
    """Requests can ask for the experts of every token."""
