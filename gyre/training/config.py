"""Configuration of a trainer process."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gyre.core.config import Positive
from gyre.core.errors import ConfigError
from gyre.training.objective import ObjectiveConfig
from gyre.transport.section import ShmSection, TransportSection

Precision = Literal["float32", "bfloat16"]
"""Of matrix products and attention. Parameters, gradients, optimizer state and everything published are fp32."""


def require_trainable(model: Mapping[str, Any], where: str) -> None:
    """`model`: what a Hugging Face config.json says. Raises ConfigError naming what Gyre's trainer cannot do."""
    for field, allowed in (
        ("model_type", ("qwen3", "qwen3_moe", "llama")),
        ("hidden_act", ("silu",)),
        ("attention_bias", (False,)),
        ("mlp_bias", (False,)),
        ("use_sliding_window", (False,)),
    ):
        value = model.get(field, allowed[0])
        if value not in allowed:
            raise ConfigError(f"{where}: {field}={value!r} cannot be trained, allowed: {', '.join(map(str, allowed))}")


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layout of a cell; the same for all cells of a run. A size that the backend lacks is a ValueError, which a config
    file's reader reports with file and key."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    """Replicas inside the cell; they share out the executions of each micro-step."""
    context: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data", "context", "expert"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} is not a number of ranks: it must be at least 1")
        if self.context > 1:
            raise ValueError(
                f"context = {self.context}: attention over trees is not split over context-parallel ranks; "
                "it must be 1, use tensor parallelism for long rows"
            )
        if self.expert > 1:
            raise ValueError(
                f"expert = {self.expert}: experts are split over tensor-parallel ranks, each holding a part of every "
                "expert; it must be 1"
            )

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data


class OptimizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Adam with decoupled weight decay; the defaults are the paper's."""

    learning_rate: Annotated[float, Meta(ge=0)] = 1e-6
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    epsilon: Annotated[float, Meta(gt=0)] = 1e-15
    weight_decay: Annotated[float, Meta(ge=0)] = 0.01
    """Of matrices; norms and biases do not decay."""
    clip_norm: Annotated[float, Meta(gt=0)] = 1.0
    """Global gradient norm above which the gradient is scaled down."""


class TrainerSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[trainer]: layout of a cell and its optimizer."""

    parallel: ParallelConfig = ParallelConfig()
    precision: Precision = "float32"
    share_prefixes: bool = True
    """Packed-tree training: rows of one pack that begin alike compute the common part once. False: every row is
    computed whole, and counts whole in `admission.micro_step_tokens`."""
    replay_routing: bool = False
    """For a policy with experts: engines tell which experts they chose, and the trainer takes the same where a row has
    a record of them (docs/training.md, "Routing replay")."""
    optimizer: OptimizerConfig = OptimizerConfig()
    threads: Positive = 1
    group_timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    """Longest wait for another cell in a gradient reduction."""


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One training rank of a cell."""

    cell: int
    """Index of the cell; 0 is the core."""
    cells: int
    """K."""
    model_dir: str
    """Hugging Face directory with config, tokenizer and the initial weights."""
    transport_root: str
    """Directory in shared memory under which every process of the run publishes."""
    transport: TransportSection = ShmSection()
    store: str
    """host:port of the rendezvous store that the controller serves (`transport.rendezvous.StoreServer`)."""
    host: str = "127.0.0.1"
    """Address at which the other cells reach this one; the worker has it from its launcher."""
    rank: int = 0
    """Rank inside the cell."""
    incarnation: int = 0
    """Counts restarts of the cell, so that a new process never meets the rendezvous keys of a dead one."""
    temperature: float
    """Temperature of the rollouts: log-probabilities are those of the distribution that was sampled from."""
    objective: ObjectiveConfig = ObjectiveConfig()
    seed: int
    section: TrainerSection = TrainerSection()
