"""What a local engine needs to know before it starts."""

import msgspec

from gyre.core.errors import ConfigError
from gyre.transport.base import WeightRef
from gyre.transport.section import ShmSection, TransportSection


class LocalEngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model_dir: str
    """Hugging Face directory; only its `config.json` is read. The weights come through the transport."""
    transport_root: str
    """Directory in shared memory under which every process of the run publishes."""
    transport: TransportSection = ShmSection()
    weights: WeightRef | None = None
    """Published weights to start with; without them the engine is NotReady until the first `update_weights`."""
    kv_blocks: int = 2048
    """KV memory in blocks of `page_size` tokens."""
    page_size: int = 16
    """Tokens of a KV block, the grain of prefix reuse."""
    max_batch_tokens: int = 1024
    """Most tokens of one forward pass; a longer prompt is prefilled in parts, so others keep decoding."""
    max_requests: int = 64
    """Most requests of one forward pass; more wait their turn."""
    max_context: int = 8192
    """Prompt plus output; a generation that reaches it ends with finish "length"."""
    seed: int = 0
    """Of the sampler. Outputs also depend on how requests are batched, so they repeat only for the same arrivals."""
    threads: int = 1
    """Torch threads of the forward pass."""
    tell_routing: bool = False
    """Keeps the experts of every token in the KV memory, so that requests can ask for them."""

    def __post_init__(self) -> None:
        for name in ("kv_blocks", "max_batch_tokens", "max_requests", "max_context", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"local engine: {name} = {getattr(self, name)} must be at least 1")
        if self.page_size < 4:
            raise ConfigError(f"local engine: page_size = {self.page_size} must be at least 4")
        if self.max_requests > self.max_batch_tokens:
            raise ConfigError(
                f"local engine: max_requests = {self.max_requests} exceeds max_batch_tokens = {self.max_batch_tokens};"
                " every running request needs one token of a pass"
            )
