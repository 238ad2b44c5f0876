"""Whether engines and trainers can take the policy apart as configured; its config.json tells the sizes."""

import msgspec

from gyre.core.config import Positive
from gyre.core.errors import ConfigError
from gyre.engines.section import EngineSection
from gyre.engines.sglang.config import SglangSection
from gyre.training.config import ParallelConfig


class Sizes(msgspec.Struct):
    """Of a model's config.json."""

    vocab_size: Positive
    hidden_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    max_position_embeddings: Positive | None = None
    intermediate_size: Positive | None = None
    moe_intermediate_size: Positive | None = None


def require_layout(layout: ParallelConfig, sizes: Sizes, model: str) -> None:
    """What of the model is split over a trainer's tensor and pipeline ranks must be divisible by their number. Raises
    ConfigError."""
    for key, parts, fields in (
        (
            "tensor",
            layout.tensor,
            ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "vocab_size"),
        ),
        ("pipeline", layout.pipeline, ("num_hidden_layers",)),
    ):
        for field in fields:
            size = getattr(sizes, field) or 0
            if size % parts:
                raise ConfigError(
                    f"trainer.parallel.{key} = {parts} does not divide {field} = {size} of {model}; choose a divisor"
                )


def require_servable(engine: EngineSection, sizes: Sizes, model: str) -> None:
    """What SGLang refuses of a model's sizes only when its server starts. Raises ConfigError."""
    if not isinstance(engine, SglangSection):
        return
    if engine.args.get("enable-dp-attention"):
        # Attention is then split over a part of the ranks.
        return
    heads, shared = sizes.num_attention_heads, sizes.num_key_value_heads or sizes.num_attention_heads
    # With fewer key-value heads than ranks, each rank has a copy of one.
    if heads % engine.tensor or max(shared, engine.tensor) % min(shared, engine.tensor):
        raise ConfigError(
            f"engine.tensor = {engine.tensor} does not divide num_attention_heads = {heads} or does not go with "
            f"num_key_value_heads = {shared} of {model}; choose a divisor of both"
        )
