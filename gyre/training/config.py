"""Configuration of a trainer process."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gyre.core.config import Positive
from gyre.training.step.objective import ObjectiveConfig
from gyre.transport.section import ShmSection, TransportSection

Precision = Literal["float32", "bfloat16"]
"""Of parameters, matrix products and what is published. With bfloat16 the core has fp32 masters of the parameters.
Gradients, optimizer state, norms, routers and log-probabilities are fp32 always."""

Activations = Literal["keep", "recompute", "offload"]
"""What of a forward pass waits for the backward pass: everything; each layer's input, from which the layer is computed
again; or that input in host memory."""


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layout of a cell; the same for all cells of a run. A size that cannot be is a ValueError, which a config file's
    reader reports with file and key."""

    tensor: int = 1
    """Ranks that share out heads and the width of layers; tokens between products are split over them too."""
    pipeline: int = 1
    """Stages."""
    stages: list[int] = []
    """Layers of each stage. Default: as even as can be, the first and the last stage having the fewest."""
    data: int = 1
    """Replicas inside the cell; they share out the executions of each micro-step."""
    context: int = 1
    """Ranks that share out the tokens of a pack."""
    expert: int = 1
    """Ranks that share out the experts; they are taken from the tensor, context and data ranks of a stage."""

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data", "context", "expert"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} is not a number of ranks: it must be at least 1")
        of_stage = self.tensor * self.data * self.context
        if of_stage % self.expert:
            raise ValueError(
                f"expert = {self.expert} does not divide tensor × context × data = {of_stage}, the ranks of a stage "
                "that share out its experts"
            )
        if self.stages and (len(self.stages) != self.pipeline or min(self.stages) < 1):
            raise ValueError(
                f"stages = {self.stages} must have one number of layers, at least 1, for each of pipeline = "
                f"{self.pipeline} stages"
            )

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def lockstep(self) -> bool:
        """Whether replicas exchange tokens, so that each must compute as many packs as the others."""
        return self.expert > self.tensor * self.context


def stages_of(layout: ParallelConfig, layers: int) -> list[int]:
    """Layers of each pipeline stage. Raises ValueError when they are too few, or not those of the model."""
    if layout.stages:
        if sum(layout.stages) != layers:
            raise ValueError(f"stages = {layout.stages} have {sum(layout.stages)} layers and the model has {layers}")
        return list(layout.stages)
    if layers < layout.pipeline:
        raise ValueError(f"{layers} layers cannot be split over {layout.pipeline} pipeline stages")
    least, more = divmod(layers, layout.pipeline)
    # Embedding and output weigh on the ends: extra layers go to the middle first.
    order = sorted(range(layout.pipeline), key=lambda stage: (min(stage, layout.pipeline - 1 - stage) == 0, stage))
    return [least + (order.index(stage) < more) for stage in range(layout.pipeline)]


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
    shard: bool = False
    """Ranks of the core that hold the same parameters share out their optimizer state (ZeRO-1)."""
    offload: bool = False
    """Optimizer state waits in host memory between updates."""


class TrainerSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[trainer]: layout of a cell and its optimizer."""

    parallel: ParallelConfig = ParallelConfig()
    precision: Precision = "float32"
    activations: Activations = "keep"
    logprob_chunk: Positive = 1024
    """Targets whose logits exist at one time; more are processed chunk by chunk and recomputed in the backward pass."""
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
