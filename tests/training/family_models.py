"""Tiny random models of the real config class of each family that the trainer knows."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
LINEAR = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
    "routed_scaling_factor": 1.7,
}
LATENT = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
HYBRID = {**SIZES, **LINEAR, "full_attention_interval": 4}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
DEEPSEEK = {k: v for k, v in SIZES.items() if k not in ("head_dim", "num_key_value_heads")}

FAMILY_CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**SIZES, attention_bias=True),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, **EXPERTS, mlp_only_layers=[1], norm_topk_prob=True),
    "qwen3-next": Qwen3NextConfig(**HYBRID, **EXPERTS, shared_expert_intermediate_size=48),
    "qwen3.5-moe": Qwen3_5MoeConfig(
        text_config={**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 48}, vision_config=VISION
    ),
    "qwen3.5": Qwen3_5Config(text_config=HYBRID, vision_config=VISION),
    "llama": LlamaConfig(**SIZES, attention_bias=True),
    "mistral": MistralConfig(**SIZES, sliding_window=24),
    "glm4-moe": Glm4MoeConfig(**SIZES, **ROUTED, use_qk_norm=True, attention_bias=True),
    "deepseek-v3": DeepseekV3Config(
        **DEEPSEEK,
        **ROUTED,
        **LATENT,
        q_lora_rank=40,
        n_group=4,
        topk_group=2,
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek-v3-plain-query": DeepseekV3Config(
        **DEEPSEEK, **{**ROUTED, "first_k_dense_replace": 0}, **LATENT, q_lora_rank=None, n_group=1, topk_group=1
    ),
    "gpt-oss": GptOssConfig(
        **{**SIZES, "intermediate_size": 32},
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=24,
        rope_parameters={**YARN, "truncate": False},
    ),
}


def make_family_model(name: str, directory: Path) -> PreTrainedModel:
    """Saved to `directory`. Norms are random too, so that a swap would show; experts are the plain ones."""
    torch.manual_seed(11)
    config = FAMILY_CONFIGS[name]
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32)
    around_zero = name.startswith(("qwen3-next", "qwen3.5"))
    with torch.no_grad():
        for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor_name.endswith("e_score_correction_bias"):
                tensor.normal_(0.0, 0.2)
            elif tensor_name in dict(model.named_parameters()):
                norm = tensor.dim() == 1 and tensor_name.endswith("norm.weight")
                centred = around_zero and "linear_attn.norm" not in tensor_name
                tensor.normal_(1.0 if norm and not centred else 0.0, 0.2 if tensor.dim() == 1 else 0.07)
    model.save_pretrained(directory)
    (directory / "tokenizer_config.json").write_text("{}")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.eval()
