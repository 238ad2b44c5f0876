"""Whether files have the tensors that a model of its config.json must have."""

import re
from collections.abc import Mapping

from gyre.core.errors import ConfigError
from gyre.core.system.tensor_files import FLOATS, Tensor
from gyre.training.models.architecture import Architecture
from gyre.training.models.tensors import tensors_of


def require_tensors(found: Mapping[str, Tensor], architecture: Architecture, model: str) -> None:
    """The files' tensors are those of config.json, in a floating-point type. Raises ConfigError naming one that is
    not."""
    apart = not any(name.endswith(".experts.gate_up_proj") for name in found)
    count = len(architecture.layers)
    for declared in tensors_of(architecture, apart):
        name, shape = declared.name, declared.shape
        tensor = found.get(name)
        if tensor is None:
            raise ConfigError(
                f"the weights of {model} lack {name}, which config.json asks for (num_hidden_layers = "
                f"{count}); get config and weights of the same model"
            )
        if tensor.shape != shape:
            raise ConfigError(
                f"{name} of {model} has the shape {list(tensor.shape)} and by config.json it is {list(shape)}; get "
                "config and weights of the same model"
            )
        if tensor.dtype not in FLOATS:
            raise ConfigError(
                f"{name} of {model} is of type {tensor.dtype}: quantized weights cannot be trained; give the model in "
                f"one of {', '.join(FLOATS)}"
            )
    # What follows the last layer may be for predicting several tokens at once, which the trainer carries along.
    attention = re.compile(re.escape(architecture.prefix) + r"layers\.(\d+)\.(?:self_attn|linear_attn)\.")
    layers = {int(match[1]) for name in found if (match := attention.match(name))}
    if layers and max(layers) >= count + architecture.carried_layers:
        raise ConfigError(
            f"the weights of {model} have {max(layers) + 1} layers and config.json says num_hidden_layers = "
            f"{count}; get config and weights of the same model"
        )


def parameters(architecture: Architecture) -> int:
    """How many numbers the model has."""
    return sum(declared.numbers for declared in tensors_of(architecture))
