"""The tensors that a trainable model must have, by its config.json: names of Hugging Face and their shapes."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from gyre.control.live.fit import Sizes
from gyre.core.errors import ConfigError
from gyre.core.expert_routing import expert_count, sparse_layers
from gyre.core.tensor_files import FLOATS, Tensor

LAYER = "model.layers."


def expected(config: Mapping[str, Any], sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of a qwen3, qwen3_moe or llama model."""
    hidden, head = sizes.hidden_size, sizes.head_dim or sizes.hidden_size // sizes.num_attention_heads
    queries = sizes.num_attention_heads * head
    keys = (sizes.num_key_value_heads or sizes.num_attention_heads) * head
    experts = expert_count(config)
    dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step") or 1
    sparse = set(sparse_layers(sizes.num_hidden_layers, dense, step)) if experts else set()
    yield "model.embed_tokens.weight", (sizes.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.get("tie_word_embeddings", False):
        yield "lm_head.weight", (sizes.vocab_size, hidden)
    for layer in range(sizes.num_hidden_layers):
        name = f"{LAYER}{layer}."
        yield name + "input_layernorm.weight", (hidden,)
        yield name + "post_attention_layernorm.weight", (hidden,)
        yield name + "self_attn.q_proj.weight", (queries, hidden)
        yield name + "self_attn.k_proj.weight", (keys, hidden)
        yield name + "self_attn.v_proj.weight", (keys, hidden)
        yield name + "self_attn.o_proj.weight", (hidden, queries)
        if config.get("model_type") != "llama":
            yield name + "self_attn.q_norm.weight", (head,)
            yield name + "self_attn.k_norm.weight", (head,)
        if layer not in sparse:
            yield from _mlp(name + "mlp.", hidden, sizes.intermediate_size or 0)
            continue
        yield name + "mlp.gate.weight", (experts, hidden)
        for expert in range(experts):
            yield from _mlp(f"{name}mlp.experts.{expert}.", hidden, sizes.moe_intermediate_size or 0)


def require_tensors(found: Mapping[str, Tensor], config: Mapping[str, Any], sizes: Sizes, model: str) -> None:
    """The files' tensors are those of config.json, in a floating-point type. Raises ConfigError naming one that is
    not."""
    for name, shape in expected(config, sizes):
        tensor = found.get(name)
        if tensor is None:
            raise ConfigError(
                f"the weights of {model} lack {name}, which config.json asks for (num_hidden_layers = "
                f"{sizes.num_hidden_layers}); get config and weights of the same model"
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
    layers = {int(index) for name in found if (index := name.removeprefix(LAYER).partition(".")[0]).isdigit()}
    if layers and max(layers) >= sizes.num_hidden_layers:
        raise ConfigError(
            f"the weights of {model} have {max(layers) + 1} layers and config.json says num_hidden_layers = "
            f"{sizes.num_hidden_layers}; get config and weights of the same model"
        )


def parameters(config: Mapping[str, Any], sizes: Sizes) -> int:
    """How many numbers the model has."""
    return sum(math.prod(shape) for _, shape in expected(config, sizes))


def _mlp(name: str, hidden: int, intermediate: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield name + "gate_proj.weight", (intermediate, hidden)
    yield name + "up_proj.weight", (intermediate, hidden)
    yield name + "down_proj.weight", (hidden, intermediate)
