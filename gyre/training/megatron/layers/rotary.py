"""Rotary positions, computed by transformers itself, so that every rope type agrees with the engine's."""

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gyre.core.errors import ConfigError
from gyre.training.models.architecture import Architecture

_OF_THE_LENGTH = ("dynamic", "longrope")
"""Rope types whose frequencies depend on the length of the sequence: a token's hidden state would change with what
follows it, in the engine too."""


class Rotary:
    """`config`: the Hugging Face config of the language model. Raises ConfigError for a type that cannot be trained."""

    def __init__(self, config: Any, architecture: Architecture, device: torch.device) -> None:
        rope = config.rope_parameters
        kind = rope["rope_type"]
        if kind in _OF_THE_LENGTH:
            raise ConfigError(f"rope type {kind!r} depends on the length of a sequence, which the trainer does not do")
        if kind == "default":
            exponents = torch.arange(0, architecture.rotary_dim, 2, dtype=torch.int64).float() / architecture.rotary_dim
            frequencies, self._scale = 1.0 / (rope["rope_theta"] ** exponents), 1.0
        else:
            frequencies, self._scale = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"))
        self._frequencies = torch.as_tensor(frequencies).to(device)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of each position's angles, [tokens, rotary dimensions / 2] each, fp32."""
        angles = torch.outer(positions.float(), self._frequencies)
        return angles.cos() * self._scale, angles.sin() * self._scale


def score_scale(config: Any) -> float:
    """What some rope types multiply the scores of latent attention by."""
    rope = config.rope_parameters
    if rope["rope_type"] == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_get_mscale

    return float(yarn_get_mscale(rope["factor"], rope["mscale_all_dim"])) ** 2
