"""Whether engines and trainers can take the policy apart as configured; its architecture tells the sizes."""

from gyre.core.errors import ConfigError
from gyre.engines.section import EngineSection
from gyre.engines.sglang.config import SglangSection
from gyre.training.config import ParallelConfig, stages_of
from gyre.training.models.architecture import Architecture


def require_layout(layout: ParallelConfig, model: Architecture, where: str) -> None:
    """What of the model is split over a trainer's ranks must be divisible by their number. Raises ConfigError."""
    checked: list[tuple[str, int, str, int]] = [("tensor", layout.tensor, "vocab_size", model.vocabulary)]
    if any(not layer.sparse for layer in model.layers):
        checked.append(("tensor", layout.tensor, "intermediate_size", model.intermediate))
    mixer = model.attention or model.latent
    if mixer is not None:
        checked.append(("tensor", layout.tensor, "num_attention_heads", mixer.heads))
    if model.attention is not None:
        groups = model.attention.groups
        # With fewer key-value heads than ranks, each rank has a copy of one.
        if max(groups, layout.tensor) % min(groups, layout.tensor):
            checked.append(("tensor", layout.tensor, "num_key_value_heads", groups))
    if model.delta is not None:
        checked.append(("tensor", layout.tensor, "linear_num_key_heads", model.delta.key_heads))
        part = model.delta.key_heads // layout.tensor
        checked.append(("context", layout.context, "linear_num_key_heads of a tensor rank", part))
    if model.experts is not None:
        checked.append(("expert", layout.expert, "number of experts", model.experts.count))
        if model.experts.shared:
            checked.append(("tensor", layout.tensor, "intermediate size of shared experts", model.experts.shared))
    elif layout.expert > 1:
        raise ConfigError(f"trainer.parallel.expert = {layout.expert}, but {where} has no experts; set it to 1")
    for key, parts, what, size in checked:
        if size % parts:
            raise ConfigError(f"trainer.parallel.{key} = {parts} does not divide {what} = {size} of {where}")
    try:
        stages_of(layout, len(model.layers))
    except ValueError as error:
        raise ConfigError(f"trainer.parallel.pipeline: {error}; {where} says how many") from None


def require_servable(engine: EngineSection, model: Architecture, where: str) -> None:
    """What SGLang refuses of a model's sizes only when its server starts. Raises ConfigError."""
    if not isinstance(engine, SglangSection):
        return
    if engine.args.get("enable-dp-attention"):
        # Attention is then split over a part of the ranks.
        return
    mixer = model.attention or model.latent
    if mixer is None:
        return
    heads = mixer.heads
    shared = model.attention.groups if model.attention is not None else heads
    # With fewer key-value heads than ranks, each rank has a copy of one.
    if heads % engine.tensor or max(shared, engine.tensor) % min(shared, engine.tensor):
        raise ConfigError(
            f"engine.tensor = {engine.tensor} does not divide num_attention_heads = {heads} or does not go with "
            f"num_key_value_heads = {shared} of {where}; choose a divisor of both"
        )
