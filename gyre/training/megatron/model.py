"""A Megatron GPT model of an `Architecture`, forward over packs.

Embedding, layers, MLPs, sparse layers and output are Megatron's; mixers and norms are Gyre's (`attention.py`,
`delta.py`, `norm.py`), because they run over trees. Parameters are left uninitialised: they always come from a
checkpoint or from the core (`weights.py`). With several tensor-parallel ranks everything between their products is
split by tokens (sequence parallelism).
"""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch.autograd.graph import save_on_cpu
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from transformers import AutoConfig, DeepseekV3Config

from gyre.core.errors import ConfigError
from gyre.training.config import ParallelConfig, TrainerSection, stages_of
from gyre.training.megatron.forward_batch import ForwardBatch
from gyre.training.megatron.layers.attention import GroupedAttention, LatentAttention
from gyre.training.megatron.layers.delta import GatedDeltaNet
from gyre.training.megatron.layers.inputs import LayerInputs
from gyre.training.megatron.layers.moe import ReplayRouter, moe_settings, moe_spec
from gyre.training.megatron.layers.norm import Norm
from gyre.training.megatron.layers.rotary import Rotary, score_scale
from gyre.training.models.architecture import Architecture, Layer
from gyre.training.models.families import read_architecture

_MIXERS = {"attention": GroupedAttention, "latent": LatentAttention, "delta": GatedDeltaNet}


def read_config(model_dir: str) -> tuple[Architecture, Any]:
    """The architecture of a model directory, and the Hugging Face config of its language model. Raises ConfigError
    naming what Gyre's trainer cannot do."""
    file = Path(model_dir) / "config.json"
    if not file.is_file():
        raise ConfigError(f"{model_dir} has no config.json: a Hugging Face model directory is needed")
    fields = msgspec.json.decode(file.read_bytes())
    architecture = read_architecture(fields, str(file))
    if fields["model_type"] == "kimi_k2":
        # Its own class is code in the model's directory; the fields are DeepSeek-V3's.
        return architecture, DeepseekV3Config.from_dict({**fields, "model_type": "deepseek_v3"})
    return architecture, AutoConfig.from_pretrained(model_dir).get_text_config()


def build_model(
    architecture: Architecture,
    hf: Any,
    section: TrainerSection = TrainerSection(),
    temperature: float = 1.0,
) -> "PolicyModel":
    """The pipeline stage of this rank. `parallel.initialize` must have run. Raises ConfigError for a layout that the
    model's sizes do not allow."""
    try:
        dtype = torch.bfloat16 if section.precision == "bfloat16" else torch.float32
        return PolicyModel(_transformer_config(architecture, hf, section.parallel, dtype), hf, section, temperature)
    except ValueError as error:
        raise ConfigError(f"[trainer.parallel] does not go with this {architecture.family} model: {error}") from error


@dataclass
class PolicyConfig(TransformerConfig):  # type: ignore[misc]
    """Megatron's config, and what its own fields do not say."""

    architecture: Architecture | None = None
    latent_scale: float = 1.0


def _transformer_config(
    architecture: Architecture, hf: Any, layout: ParallelConfig, dtype: torch.dtype
) -> PolicyConfig:
    stages = stages_of(layout, len(architecture.layers))
    mixer = architecture.attention or architecture.latent
    assert mixer is not None
    experts = architecture.experts
    return PolicyConfig(
        architecture=architecture,
        latent_scale=score_scale(hf),
        num_layers=len(architecture.layers),
        hidden_size=architecture.hidden,
        # Mixers know their heads; Megatron's checks of key-value heads do not apply to them.
        num_attention_heads=mixer.heads,
        kv_channels=architecture.hidden // mixer.heads or 1,
        ffn_hidden_size=architecture.intermediate or architecture.hidden,
        layernorm_epsilon=architecture.norm_epsilon,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        pipeline_model_parallel_layout=_stage_layout(stages) if layout.pipeline > 1 else None,
        context_parallel_size=layout.context,
        sequence_parallel=layout.tensor > 1,
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
        **({} if experts is None else moe_settings(experts, layout.expert)),
    )


def _stage_layout(stages: list[int]) -> list[list[str]]:
    named = [["decoder"] * count for count in stages]
    return [["embedding", *named[0]], *named[1:-1], [*named[-1], "loss"]]


class PolicyModel(GPTModel):  # type: ignore[misc]
    """One pipeline stage of the policy."""

    def __init__(self, config: PolicyConfig, hf: Any, section: TrainerSection, temperature: float) -> None:
        architecture = config.architecture
        assert architecture is not None
        super().__init__(
            config=config,
            transformer_layer_spec=_stage_spec(architecture, config),
            vocab_size=architecture.vocabulary,
            max_sequence_length=architecture.positions,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="none",
            share_embeddings_and_output_weights=architecture.tied,
        )
        self.architecture = architecture
        self.temperature = temperature
        self._activations = section.activations
        self._chunk = section.logprob_chunk
        self._rotary = Rotary(hf, architecture, self.device)
        if self.post_process:
            # Predictors are picked out of gathered hidden states: the product takes whole ones.
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = config.tensor_model_parallel_size > 1

    @property
    def device(self) -> torch.device:
        return torch.device(next(self.parameters()).device)

    def _is_in_embd_group(self) -> bool:
        """Megatron asks this to copy a tied embedding to the last stage at construction, through CUDA. Here both copies
        are filled like all other parameters."""
        return False

    def forward(self, pack: ForwardBatch) -> torch.Tensor:
        """log π of every target, [U], fp32, on the last stage; hidden states [C / tp, 1, hidden] for the next one
        elsewhere, C being the tokens of a context-parallel rank. All ranks of the last stage have all of U.

        A later stage takes its input from `set_input_tensor`.
        """
        inputs = LayerInputs(pack, self._rotary)
        hidden: torch.Tensor = self.decoder.input_tensor
        if self.pre_process:
            hidden = self._embed(pack.ids_T[inputs.context.index_C])
        for layer in self.decoder.layers:
            hidden = self._kept(layer, hidden, inputs)
        if not self.post_process:
            return hidden
        hidden = self.decoder.final_layernorm(hidden)
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        # Among this rank's tokens, where those are that predict a target.
        places = torch.full_like(pack.ids_T, -1).index_copy(
            0, inputs.context.index_C, torch.arange(len(inputs.context.index_C), device=self.device)
        )[pack.predictors_U]
        (mine,) = torch.nonzero(places >= 0, as_tuple=True)
        values = self._logprobs(hidden[places[mine]], pack.targets_U[mine])
        return inputs.context.scattered(values, mine, len(places))

    def _embed(self, ids_C: torch.Tensor) -> torch.Tensor:
        """[C / tp, 1, hidden]. Megatron's own wrapper would ask for random numbers on the way."""
        embedded: torch.Tensor = self.embedding.word_embeddings(ids_C[None])
        return embedded if self.config.sequence_parallel else embedded.transpose(0, 1).contiguous()

    def _kept(self, layer: Any, hidden: torch.Tensor, inputs: LayerInputs) -> torch.Tensor:
        """A layer, and what of it waits for the backward pass."""
        if self._activations == "keep" or not torch.is_grad_enabled():
            return self._run(layer, hidden, inputs)
        where = save_on_cpu(pin_memory=True) if self._activations == "offload" and hidden.is_cuda else nullcontext()
        # To its end, also where nothing more is needed: every rank of a layer must take part in all of its exchanges.
        with where, set_checkpoint_early_stop(False):
            # No layer draws random numbers.
            output: torch.Tensor = checkpoint(
                self._run, layer, hidden, inputs, use_reentrant=False, preserve_rng_state=False
            )
        return output

    def _run(self, layer: Any, hidden: torch.Tensor, inputs: LayerInputs) -> torch.Tensor:
        router = getattr(layer.mlp, "router", None)
        if isinstance(router, ReplayRouter):
            router.choice.chosen_Tk = inputs.choices(self.architecture.sparse_layers.index(layer.layer_number - 1))
        output, _ = layer(hidden_states=hidden, attention_mask=None, packed_seq_params=inputs)
        return output  # type: ignore[no-any-return]

    def _logprobs(self, hidden_U: torch.Tensor, targets_U: torch.Tensor) -> torch.Tensor:
        if len(targets_U) <= self._chunk:
            return self._chunk_logprobs(hidden_U, targets_U)
        chunks = zip(torch.split(hidden_U, self._chunk), torch.split(targets_U, self._chunk), strict=True)
        return torch.cat([checkpoint(self._chunk_logprobs, h, t, use_reentrant=False) for h, t in chunks])

    def _chunk_logprobs(self, hidden_U: torch.Tensor, targets_U: torch.Tensor) -> torch.Tensor:
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden_U, weight=weight)
        logits = logits.float()
        if self.temperature != 1.0:
            logits = logits / self.temperature
        losses: torch.Tensor = vocab_parallel_cross_entropy(logits, targets_U[:, None])
        return -losses[:, 0]


def _stage_spec(architecture: Architecture, config: PolicyConfig) -> TransformerBlockSubmodules:
    """The layers of this rank's pipeline stage."""
    layout = config.pipeline_model_parallel_layout
    counts = [len(architecture.layers)]
    if layout is not None:
        counts = [sum(kind.name == "decoder" for kind in stage[0]) for stage in layout.layout]
    rank = parallel_state.get_pipeline_model_parallel_rank()
    first = sum(counts[:rank])
    layers = [_layer_spec(layer) for layer in architecture.layers[first : first + counts[rank]]]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)


def _layer_spec(layer: Layer) -> ModuleSpec:
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=ModuleSpec(module=_MIXERS[layer.mixer]),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=Norm,
            mlp=moe_spec() if layer.sparse else ModuleSpec(module=MLP, submodules=linear),
            mlp_bda=get_bias_dropout_add,
        ),
    )
