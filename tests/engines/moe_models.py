"""What a plain forward of a Qwen3-MoE policy chooses."""

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter


def moe_config(**changes: Any) -> Qwen3MoeConfig:
    sizes = {
        "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "num_experts": 7,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True, "tie_word_embeddings": False,
    }  # fmt: skip
    return Qwen3MoeConfig(**(sizes | changes))


def moe_model(config: Qwen3MoeConfig, seed: int) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3)
    return made


def plain_experts(model: Qwen3MoeForCausalLM, ids: list[int]) -> np.ndarray:
    """Sorted, [T, L, k]."""
    chosen: list[torch.Tensor] = []
    routers = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
    hooks = [router.register_forward_hook(lambda *at: chosen.append(at[2][2])) for router in routers]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1).sort(-1).values.numpy()
