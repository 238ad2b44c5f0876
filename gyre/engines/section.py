"""[engine] of a run's configuration: which engine, and its memory and batching.

`kind` chooses. A section knows the worker that serves it and turns itself into that worker's config.
"""

from typing import ClassVar, Literal

import msgspec

from gyre.core.config import Positive
from gyre.core.errors import ConfigError
from gyre.engines.config import EngineConfig
from gyre.engines.local.config import LocalEngineConfig
from gyre.engines.sglang.config import CONTEXT_RESERVE, SenderConfig, SglangEngineConfig
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
    page_size: Positive = 16
    max_batch_tokens: Positive = 1024
    max_requests: Positive = 64
    threads: Positive = 1

    def require(self, max_context: int) -> None:
        """Raises ConfigError when no request of `max_context` tokens could run, or no engine start."""
        self.worker_config(EngineConfig(model_dir="", transport_root="", max_context=max_context))
        blocks = -(-max_context // self.page_size)
        if self.kv_blocks < blocks:
            raise ConfigError(
                f"engine.kv_blocks = {self.kv_blocks} holds less than one context of "
                f"rollout.max_context = {max_context} tokens; at least {blocks} are needed"
            )

    def worker_config(self, common: EngineConfig) -> LocalEngineConfig:
        return LocalEngineConfig(
            **msgspec.structs.asdict(common),
            kv_blocks=self.kv_blocks,
            page_size=self.page_size,
            max_batch_tokens=self.max_batch_tokens,
            max_requests=self.max_requests,
            threads=self.threads,
        )

    def sender_config(self, transport_root: str, transport: TransportSection) -> SenderConfig | None:  # noqa: ARG002
        """The engine maps each snapshot itself."""
        return None


class SglangSection(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="sglang"
):
    """One SGLang server per engine, started by its worker. The fields are those of `SglangEngineConfig`, and of
    `SenderConfig`."""

    entry: ClassVar[str] = "gyre.engines.sglang.worker:main"
    start_timeout_s: ClassVar[float] = 660.0
    """A little longer than the worker waits for its server, so that the worker tells what was wrong."""

    python: str
    device: Literal["cuda", "cpu"] = "cuda"
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] = "bfloat16"
    tensor: Positive = 1
    kv_tokens: Positive | None = None
    max_requests: Positive = 64
    stream_interval: Positive = 8
    args: dict[str, str | int | float | bool] = {}
    weights: Literal["snapshot", "broadcast"] = "snapshot"
    """How published weights reach the server: it loads the snapshot's file, or a sender broadcasts it to its ranks."""
    sender_gpu: str = ""
    """The GPU that senders broadcast from over NCCL, named like `devices.ids` and not among them. Without one they send
    from host memory over gloo."""
    sender_host: str = "127.0.0.1"

    @property
    def gpus(self) -> int:
        """Devices of one engine."""
        return self.tensor if self.device == "cuda" else 0

    def require(self, max_context: int) -> None:
        """Raises ConfigError when no request of `max_context` tokens could run, or no engine start."""
        needed = max_context + CONTEXT_RESERVE
        if self.kv_tokens is not None and self.kv_tokens < needed:
            raise ConfigError(
                f"engine.kv_tokens = {self.kv_tokens} holds less than one context of "
                f"rollout.max_context = {max_context} tokens; at least {needed} are needed"
            )
        if self.sender_gpu and (self.device != "cuda" or self.weights != "broadcast"):
            raise ConfigError(
                f'engine.sender_gpu = "{self.sender_gpu}" needs engine.weights = "broadcast" and engine.device = "cuda"'
            )
        if self.weights == "broadcast":
            self._require_tensor_parallel()

    def worker_config(self, common: EngineConfig) -> SglangEngineConfig:
        return SglangEngineConfig(
            **msgspec.structs.asdict(common),
            python=self.python,
            device=self.device,
            dtype=self.dtype,
            tensor=self.tensor,
            kv_tokens=self.kv_tokens,
            max_requests=self.max_requests,
            stream_interval=self.stream_interval,
            args=self.args,
        )

    def sender_config(self, transport_root: str, transport: TransportSection) -> SenderConfig | None:
        """Of the process beside each engine; None when there is none."""
        if self.weights == "snapshot":
            return None
        return SenderConfig(
            transport_root=transport_root,
            transport=transport,
            host=self.sender_host,
            device="cuda" if self.sender_gpu else "cpu",
        )

    def _require_tensor_parallel(self) -> None:
        for key in ("pp-size", "pipeline-parallel-size", "dp-size", "data-parallel-size"):
            if self.args.get(key, 1) != 1:
                raise ConfigError(
                    f'engine.args.{key} = {self.args[key]} needs engine.weights = "snapshot": '
                    "SGLang takes a broadcast on tensor-parallel ranks only"
                )


EngineSection = LocalSection | SglangSection
