"""Families of models that the trainer knows: from a config.json to an `Architecture`.

Each family is one function of the config's fields. A nested `text_config` is the language model of a wrapper, whose
other tensors (vision, multi-token prediction) are carried through untouched. What a family cannot do is named.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from gyre.core.errors import ConfigError
from gyre.training.models.architecture import Architecture, Attention, DeltaNet, Experts, Latent, Layer

Config = Mapping[str, Any]


def read_architecture(config: Config, where: str) -> Architecture:
    """`config`: what a Hugging Face config.json says. Raises ConfigError naming what Gyre's trainer cannot do."""
    kind = config.get("model_type")
    family = FAMILIES.get(str(kind))
    if kind is None:
        raise ConfigError(f"config.json of {where} is not that of a language model (it has no model_type)")
    if family is None:
        raise ConfigError(
            f"{where}: model_type={kind!r} cannot be trained: gyre/training/models/families.py declares "
            f"no such family, only {', '.join(sorted(FAMILIES))}"
        )
    text = {**config, **config.get("text_config", {})}
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    _require(text, where, "hidden_act", ("silu",))
    if text.get("quantization_config") is not None:
        raise ConfigError(
            f"{where} is quantized (config.json has quantization_config), and quantized weights cannot be trained: "
            "give the model that it was made from, or convert it to bfloat16 or float32 safetensors first"
        )
    try:
        # Once more through its declaration, which knows what a size is.
        return msgspec.convert(msgspec.to_builtins(family(text, where, tied)), Architecture)
    except KeyError as error:
        raise ConfigError(f"{where} has no {error.args[0]}, which a {kind} model needs") from error
    except (msgspec.ValidationError, ArithmeticError, TypeError, ValueError) as error:
        raise ConfigError(f"config.json of {where} is not that of a language model ({error})") from error


def _require(config: Config, where: str, field: str, allowed: tuple[object, ...]) -> None:
    value = config.get(field, allowed[0])
    if value not in allowed:
        raise ConfigError(f"{where}: {field}={value!r} cannot be trained, allowed: {', '.join(map(str, allowed))}")


def _rope(config: Config) -> Config:
    """transformers 5 nests what published configs have flat."""
    rope: Config = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope


def _head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _rotary_dim(config: Config, head_dim: int, share: float = 1.0) -> int:
    return int(head_dim * (_rope(config).get("partial_rotary_factor") or config.get("partial_rotary_factor") or share))


def _common(config: Config, tied: bool) -> dict[str, Any]:
    return {
        "family": config["model_type"],
        "hidden": config["hidden_size"],
        "vocabulary": config["vocab_size"],
        "positions": config.get("max_position_embeddings") or 1 << 30,
        "intermediate": config.get("intermediate_size") or 0,
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "tied": tied,
        "carried_layers": config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0,
    }


def _plain(config: Config, **changes: Any) -> Attention:
    heads = config["num_attention_heads"]
    return Attention(
        heads=heads, groups=config.get("num_key_value_heads") or heads, head_dim=_head_dim(config), **changes
    )


def _windows(config: Config) -> list[int | None]:
    """The window of each layer, from layer_types or from what stands for them in older configs."""
    count, window = config["num_hidden_layers"], config.get("sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        return [window] * count
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _llama(config: Config, where: str, tied: bool) -> Architecture:
    _require(config, where, "mlp_bias", (False,))
    bias = bool(config.get("attention_bias", False))
    attention = _plain(config, qkv_bias=bias, output_bias=bias)
    layers = (Layer(mixer="attention"),) * config["num_hidden_layers"]
    return Architecture(
        layers=layers, attention=attention, rotary_dim=_rotary_dim(config, attention.head_dim), **_common(config, tied)
    )


def _mistral(config: Config, _: str, tied: bool) -> Architecture:
    attention = _plain(config)
    layers = tuple(Layer(mixer="attention", window=window) for window in _windows(config))
    return Architecture(
        layers=layers, attention=attention, rotary_dim=_rotary_dim(config, attention.head_dim), **_common(config, tied)
    )


def _qwen3(config: Config, _: str, tied: bool) -> Architecture:
    bias = bool(config.get("attention_bias", False))
    attention = _plain(config, qk_norm=True, qkv_bias=bias, output_bias=bias)
    windows = _windows(config) if config.get("use_sliding_window") else [None] * config["num_hidden_layers"]
    sparse = _qwen_sparse(config) if config.get("num_experts") or config.get("num_local_experts") else set()
    layers = tuple(Layer(mixer="attention", window=w, sparse=i in sparse) for i, w in enumerate(windows))
    return Architecture(
        layers=layers,
        attention=attention,
        experts=_qwen_experts(config) if sparse else None,
        rotary_dim=_rotary_dim(config, attention.head_dim),
        **_common(config, tied),
    )


def _qwen_sparse(config: Config) -> set[int]:
    dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step") or 1
    return {i for i in range(config["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0}


def _qwen_experts(config: Config, normalized: bool = False, **changes: Any) -> Experts:
    return Experts(
        count=config.get("num_experts") or config["num_local_experts"],
        chosen=config["num_experts_per_tok"],
        intermediate=config["moe_intermediate_size"],
        score="softmax",
        normalized=config.get("norm_topk_prob", normalized),
        **changes,
    )


def _hybrid(config: Config, tied: bool, fused: bool, prefix: str, sparse: bool) -> Architecture:
    """Qwen3-Next and Qwen3.5: linear attention in most layers, gated softmax attention in the others."""
    count = config["num_hidden_layers"]
    step = config.get("full_attention_interval", 4)
    kinds = config.get("layer_types") or [
        "full_attention" if (i + 1) % step == 0 else "linear_attention" for i in range(count)
    ]
    bias = bool(config.get("attention_bias", False))
    attention = _plain(config, qk_norm=True, gated=True, qkv_bias=bias, output_bias=bias)
    having = _qwen_sparse(config) if sparse else set()
    layers = tuple(
        Layer(mixer="attention" if kind == "full_attention" else "delta", sparse=i in having)
        for i, kind in enumerate(kinds)
    )
    delta = DeltaNet(
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        kernel=config["linear_conv_kernel_dim"],
        fused=fused,
    )
    experts = None
    if sparse:
        shared = config.get("shared_expert_intermediate_size") or 0
        experts = _qwen_experts(config, normalized=True, shared=shared, shared_gate=True)
    return Architecture(
        layers=layers,
        attention=attention,
        delta=delta,
        experts=experts,
        rotary_dim=_rotary_dim(config, attention.head_dim, 0.25),
        norm_offset=1.0,
        prefix=prefix,
        **_common(config, tied),
    )


def _qwen3_next(config: Config, _: str, tied: bool) -> Architecture:
    return _hybrid(config, tied, fused=True, prefix="model.", sparse=True)


def _qwen3_5(config: Config, _: str, tied: bool) -> Architecture:
    prefix = "model.language_model." if "text_config" in config else "model."
    return _hybrid(config, tied, fused=False, prefix=prefix, sparse="num_experts" in config)


def _deepseek_experts(config: Config, where: str) -> Experts:
    """Of GLM-4.5 too. The config classes call the number of experts differently from the published files."""
    _require(config, where, "norm_topk_prob", (True,))
    return Experts(
        count=config.get("n_routed_experts") or config["num_local_experts"],
        chosen=config["num_experts_per_tok"],
        intermediate=config["moe_intermediate_size"],
        score="sigmoid",
        normalized=True,
        correction=True,
        groups=config.get("n_group") or 1,
        chosen_groups=config.get("topk_group") or 1,
        scaling=config.get("routed_scaling_factor", 1.0),
        shared=config["moe_intermediate_size"] * (config.get("n_shared_experts") or 0),
        shared_name="shared_experts",
    )


def _glm4_moe(config: Config, where: str, tied: bool) -> Architecture:
    attention = _plain(
        config, qk_norm=bool(config.get("use_qk_norm")), qkv_bias=bool(config.get("attention_bias", False))
    )
    dense = config.get("first_k_dense_replace") or 0
    return Architecture(
        layers=tuple(Layer(mixer="attention", sparse=i >= dense) for i in range(config["num_hidden_layers"])),
        attention=attention,
        experts=_deepseek_experts(config, where),
        rotary_dim=_rotary_dim(config, attention.head_dim, 0.5),
        **_common(config, tied),
    )


def _deepseek_v3(config: Config, where: str, tied: bool) -> Architecture:
    """DeepSeek-V3, R1 and Kimi-K2, whose file has another model_type and the same fields."""
    _require(config, where, "attention_bias", (False,))
    _require(config, where, "moe_layer_freq", (1,))
    dense = config.get("first_k_dense_replace") or 0
    latent = Latent(
        heads=config["num_attention_heads"],
        query_rank=config.get("q_lora_rank"),
        kv_rank=config["kv_lora_rank"],
        nope_dim=config["qk_nope_head_dim"],
        rope_dim=config["qk_rope_head_dim"],
        value_dim=config["v_head_dim"],
        interleaved=bool(config.get("rope_interleave", True)),
    )
    return Architecture(
        layers=tuple(Layer(mixer="latent", sparse=i >= dense) for i in range(config["num_hidden_layers"])),
        latent=latent,
        experts=_deepseek_experts(config, where),
        rotary_dim=latent.rope_dim,
        **_common(config, tied),
    )


def _gpt_oss(config: Config, _: str, tied: bool) -> Architecture:
    windows = _windows(config)
    if config.get("layer_types") is None:
        windows = [config["sliding_window"] if i % 2 == 0 else None for i in range(config["num_hidden_layers"])]
    bias = bool(config.get("attention_bias", True))
    attention = _plain(config, qkv_bias=bias, output_bias=bias, sinks=True)
    experts = Experts(
        count=config.get("num_local_experts") or config["num_experts"],
        chosen=config.get("num_experts_per_tok") or config["experts_per_token"],
        intermediate=config["intermediate_size"],
        score="softmax",
        normalized=True,
        router_name="router",
        router_bias=True,
        clamped=(config.get("swiglu_alpha", 1.702), config.get("swiglu_limit", 7.0)),
    )
    return Architecture(
        layers=tuple(Layer(mixer="attention", window=window, sparse=True) for window in windows),
        attention=attention,
        experts=experts,
        rotary_dim=_rotary_dim(config, attention.head_dim),
        **_common(config, tied),
    )


FAMILIES: dict[str, Callable[[Config, str, bool], Architecture]] = {
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "kimi_k2": _deepseek_v3,
    "llama": _llama,
    "mistral": _mistral,
    "qwen3": _qwen3,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5,
    "qwen3_5_text": _qwen3_5,
    "qwen3_moe": _qwen3,
    "qwen3_next": _qwen3_next,
}
"""model_type → the family's declaration."""
