"""What a local engine needs to know before it starts."""

from gyre.core.errors import ConfigError
from gyre.engines.config import EngineConfig


class LocalEngineConfig(EngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kv_blocks: int = 2048
    """KV memory in blocks of `page_size` tokens."""
    page_size: int = 16
    """Tokens of a KV block, the grain of prefix reuse."""
    max_batch_tokens: int = 1024
    """Most tokens of one forward pass; a longer prompt is prefilled in parts, so others keep decoding."""
    max_requests: int = 64
    """Most requests of one forward pass; more wait their turn."""
    threads: int = 1
    """Torch threads of the forward pass."""

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
