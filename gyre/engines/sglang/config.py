"""What an SGLang engine and its weight sender need to know before they start."""

from typing import Literal

import msgspec

from gyre.core.errors import ConfigError
from gyre.engines.config import EngineConfig
from gyre.transport.section import ShmSection, TransportSection


class SglangEngineConfig(EngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    python: str
    """Interpreter of the environment that has SGLang 0.5.23; Gyre itself never imports it."""
    sender: str = ""
    """RPC address of the engine's own weight sender, which broadcasts published weights to the server. Without one the
    server loads each snapshot from a file."""
    device: str = "cuda"
    """SGLang's --device. "cpu" is for tests: no memory can be released there."""
    dtype: str = "bfloat16"
    tensor: int = 1
    """Tensor-parallel ranks of this engine."""
    kv_tokens: int | None = None
    """KV memory in tokens; None leaves it to SGLang's memory fraction."""
    max_requests: int = 64
    """Most requests of one forward pass; more wait their turn."""
    stream_interval: int = 8
    """Tokens per event of a stream, after the first. Each event repeats prompt ids and everything before, so that a
    small number costs much for long contexts."""
    args: dict[str, str | int | float | bool] = msgspec.field(default_factory=dict)
    """Further arguments of `sglang.launch_server`, without dashes in front."""
    start_timeout_s: float = 600.0
    control_timeout_s: float = 600.0
    """For pauses, updates and releases. Generation has no timeout of its own: its callers have."""

    def __post_init__(self) -> None:
        for name in ("tensor", "max_requests", "max_context", "stream_interval"):
            if getattr(self, name) < 1:
                raise ConfigError(f"sglang engine: {name} = {getattr(self, name)} must be at least 1")
        if self.kv_tokens is not None and self.kv_tokens < self.max_context + CONTEXT_RESERVE:
            raise ConfigError(
                f"sglang engine: kv_tokens = {self.kv_tokens} holds less than one context; "
                f"at least {self.max_context + CONTEXT_RESERVE} are needed"
            )


class SenderConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    transport_root: str
    """Directory in shared memory under which every process of the run publishes."""
    transport: TransportSection = ShmSection()
    host: str = "127.0.0.1"
    """Where the group meets: an address of this machine that the server reaches."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Memory that the group sends from. "cpu": gloo, to servers on any device. "cuda": NCCL, from the first device that
    this process sees; NCCL refuses one that a rank of the server uses too."""
    bucket_bytes: int = 512 << 20
    """Memory that the sender and every rank need besides the weights."""
    step_timeout_s: float = 60.0
    """For the group to meet, and for one bucket."""


CONTEXT_RESERVE = 8
"""Tokens that the server keeps back of its context length for itself (6 in 0.5.23), so it is told a longer one."""
