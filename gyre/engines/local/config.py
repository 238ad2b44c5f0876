"""[engine] kind = "local", and what its worker needs to know before it starts."""

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from gyre.core.config import Positive
from gyre.core.errors import ConfigError
from gyre.engines.config import EngineConfig
from gyre.transport.section import TransportSection


class LocalSection(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="local"
):
    """The embedded engine on CPUs."""

    entry: ClassVar[str] = "gyre.engines.local.worker:main"
    start_timeout_s: ClassVar[float] = 120.0
    gpus: ClassVar[int] = 0
    sender_gpu: ClassVar[str] = ""

    kv_blocks: Positive = 2048
    """KV memory in blocks of `page_size` tokens."""
    page_size: Annotated[int, Meta(ge=4)] = 16
    """Tokens of a KV block, the grain of prefix reuse."""
    max_batch_tokens: Positive = 1024
    """Most tokens of one forward pass; a longer prompt is prefilled in parts, so others keep decoding."""
    max_requests: Positive = 64
    """Most requests of one forward pass; more wait their turn."""
    threads: Positive = 1
    """Torch threads of the forward pass."""

    def require(self, max_context: int) -> None:
        """Raises ConfigError when no request of `max_context` tokens could run, or no engine start."""
        if self.max_requests > self.max_batch_tokens:
            raise ConfigError(
                f"engine.max_requests = {self.max_requests} exceeds engine.max_batch_tokens = {self.max_batch_tokens}; "
                "every running request needs one token of a pass"
            )
        blocks = -(-max_context // self.page_size)
        if self.kv_blocks < blocks:
            raise ConfigError(
                f"engine.kv_blocks = {self.kv_blocks} holds less than one context of "
                f"rollout.max_context = {max_context} tokens; at least {blocks} are needed"
            )

    def worker_config(self, common: EngineConfig) -> "LocalEngineConfig":
        return LocalEngineConfig(**msgspec.structs.asdict(common), section=self)

    def sender_config(self, transport_root: str, transport: TransportSection) -> None:  # noqa: ARG002
        """The engine maps each snapshot itself: there is no sender."""
        return


class LocalEngineConfig(EngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    section: LocalSection = LocalSection()
