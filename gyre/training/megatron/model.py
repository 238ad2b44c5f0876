"""A Megatron GPT model of a Hugging Face Qwen3, Qwen3-MoE or Llama configuration, forward over packs.

Parameters are left uninitialised: they always come from a checkpoint or from the core (`weights.py`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gyre.core.errors import ConfigError
from gyre.training.config import require_trainable
from gyre.training.megatron.attention import NodeAttention, NodeParams
from gyre.training.megatron.experts import ExpertSizes, SparseMlp, expert_sizes
from gyre.training.megatron.forward_batch import ForwardBatch

LOGIT_CHUNK = 2**25
"""Logits that exist at one time (128 MiB in fp32); more targets are processed chunk by chunk and recomputed in the
backward pass."""


def read_config(model_dir: str) -> Any:
    """The Hugging Face config of a model directory. Raises ConfigError naming what Gyre's trainer cannot do."""
    if not (Path(model_dir) / "config.json").is_file():
        raise ConfigError(f"{model_dir} has no config.json: a Hugging Face model directory is needed")
    config = AutoConfig.from_pretrained(model_dir)
    require_trainable(config.to_dict(), f"{model_dir}/config.json")
    return config


def build_model(hf: Any, temperature: float, dtype: torch.dtype = torch.float32) -> "PolicyModel":
    """The pipeline stage of this rank. `parallel.initialize` must have run. Raises ConfigError for a layout that the
    model's sizes do not allow."""
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    for what, size, parts in (
        ("num_hidden_layers", hf.num_hidden_layers, pipeline),
        ("num_key_value_heads", hf.num_key_value_heads, tensor),
        ("num_attention_heads", hf.num_attention_heads, tensor),
        ("intermediate_size", hf.intermediate_size, tensor),
        ("vocab_size", hf.vocab_size, tensor),
        ("moe_intermediate_size", getattr(hf, "moe_intermediate_size", 0), tensor),
    ):
        if size % parts:
            raise ConfigError(f"{what}={size} cannot be split over {parts} ranks: choose a divisor")
    return PolicyModel(_transformer_config(hf, tensor, pipeline, dtype), hf, temperature)


@dataclass
class PolicyConfig(TransformerConfig):  # type: ignore[misc]
    """Megatron's config, and the experts, which are Gyre's own layer (`experts.py`)."""

    experts: ExpertSizes | None = None


def _transformer_config(hf: Any, tensor: int, pipeline: int, dtype: torch.dtype) -> PolicyConfig:
    return PolicyConfig(
        experts=expert_sizes(hf),
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        ffn_hidden_size=hf.intermediate_size,
        layernorm_epsilon=hf.rms_norm_eps,
        qk_layernorm=hf.model_type in ("qwen3", "qwen3_moe"),
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        perform_initialization=False,
        # The loss already carries its weights 1/(BN·L_i): nothing may divide gradients again.
        calculate_per_token_loss=True,
        # Fused kernels need Apex or TransformerEngine.
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        cuda_graph_scope=[],
    )


class PolicyModel(GPTModel):  # type: ignore[misc]
    """One pipeline stage of the policy."""

    def __init__(self, config: PolicyConfig, hf: Any, temperature: float) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=_stage_spec(config),
            vocab_size=hf.vocab_size,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=bool(hf.tie_word_embeddings),
        )
        self.temperature = temperature
        self.sparse = [module for module in self.modules() if isinstance(module, SparseMlp)]
        self.inverse_frequencies = _inverse_frequencies(hf).to(self.device)

    @property
    def device(self) -> torch.device:
        return torch.device(next(self.parameters()).device)

    def _is_in_embd_group(self) -> bool:
        """Megatron asks this to copy a tied embedding to the last stage at construction, through CUDA. Here both copies
        are filled like all other parameters."""
        return False

    def forward(self, pack: ForwardBatch) -> torch.Tensor:
        """log π of every target, [U], fp32, on the last stage; hidden states [T, 1, hidden] for the next one elsewhere.

        A later stage takes its input from `set_input_tensor`.
        """
        for mlp in self.sparse:
            mlp.replayed_Tk = None if pack.choices_TL is None else pack.choices_TL[:, mlp.slot].long()
        hidden: torch.Tensor = self.decoder(
            hidden_states=self.embedding(pack.ids_T[None], None) if self.pre_process else None,
            attention_mask=None,
            rotary_pos_emb=self._rotary_angles(pack.positions_T),
            packed_seq_params=NodeParams(pack.nodes, self.device),
        )
        if not self.post_process:
            # A layer's output has the precision of its products; between stages everything is fp32.
            return hidden.float()
        return self._logprobs(hidden[pack.predictors_U], pack.targets_U)

    def _rotary_angles(self, positions_T: torch.Tensor) -> torch.Tensor:
        half = torch.outer(positions_T.float(), self.inverse_frequencies)
        return torch.cat((half, half), dim=-1)[:, None, None, :]

    def _logprobs(self, hidden_U: torch.Tensor, targets_U: torch.Tensor) -> torch.Tensor:
        size = max(1, LOGIT_CHUNK // self.vocab_size)
        if len(targets_U) <= size:
            return self._chunk_logprobs(hidden_U, targets_U)
        chunks = zip(torch.split(hidden_U, size), torch.split(targets_U, size), strict=True)
        return torch.cat([checkpoint(self._chunk_logprobs, h, t, use_reentrant=False) for h, t in chunks])

    def _chunk_logprobs(self, hidden_U: torch.Tensor, targets_U: torch.Tensor) -> torch.Tensor:
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden_U, weight=weight)
        if self.temperature != 1.0:
            logits = logits.float() / self.temperature
        losses: torch.Tensor = vocab_parallel_cross_entropy(logits, targets_U[:, None])
        return -losses[:, 0]


def _stage_spec(config: PolicyConfig) -> TransformerBlockSubmodules:
    """The layers of this rank's pipeline stage."""
    count = config.num_layers // config.pipeline_model_parallel_size
    first = parallel_state.get_pipeline_model_parallel_rank() * count
    layers = [_layer_spec(config, index) for index in range(first, first + count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=LayerNormImpl)


def _layer_spec(config: PolicyConfig, index: int) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = NodeAttention
    if config.experts is not None and index in config.experts.layers:
        spec.submodules.mlp = SparseMlp
    return spec


def _inverse_frequencies(hf: Any) -> torch.Tensor:
    """Rotary frequencies [dim/2] computed by transformers itself, so that every rope type agrees with the engine's."""
    kind = hf.rope_parameters["rope_type"]
    if kind == "default":
        dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return torch.as_tensor(1.0 / (hf.rope_parameters["rope_theta"] ** exponents))
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](hf, device=torch.device("cpu"))
    if scaling != 1.0:
        raise ConfigError(f"rope type {kind!r} scales attention by {scaling}, which the trainer does not support")
    return torch.as_tensor(frequencies)
