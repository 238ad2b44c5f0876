"""Hugging Face ↔ Megatron parameters, exact in both directions and for every tensor- and pipeline-parallel layout.

Each Megatron parameter of this rank has one `Rule`: the Hugging Face tensors it is made of, the axis along which each
of those is sharded over tensor-parallel ranks, and how the shards are joined into the Megatron tensor. The same rules
carry anything that has the shape of the parameters, such as optimizer moments.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gyre.core.errors import WeightsUnavailable
from gyre.training.megatron.experts import SparseMlp
from gyre.training.megatron.model import PolicyModel
from gyre.transport import experts

Join = Literal["one", "gate_up", "qkv", "experts"]


@dataclass(frozen=True)
class Rule:
    """How one Megatron parameter is made from Hugging Face tensors."""

    megatron: str
    hf: tuple[str, ...]
    axis: int | None
    """Axis of every `hf` tensor that tensor-parallel ranks share out; None when all ranks hold all of it. Gate and up
    projections of experts come as one tensor [experts, 2·I, hidden], whose axis counts after I is split off."""
    join: Join = "one"


def rules(model: PolicyModel) -> list[Rule]:
    """The rules of the parameters on this rank, in a fixed order. Tied output weights have no rule on the first stage:
    they are the embedding."""
    found: list[Rule] = []
    if model.pre_process:
        found.append(Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), 0))
    for index, layer in enumerate(model.decoder.layers):
        names = f"decoder.layers.{index}.", f"model.layers.{layer.layer_number - 1}."
        found += _attention_rules(*names, model)
        found += _expert_rules(*names) if isinstance(layer.mlp, SparseMlp) else _mlp_rules(*names)
    if model.post_process:
        found.append(Rule("decoder.final_layernorm.weight", ("model.norm.weight",), None))
        tied = model.share_embeddings_and_output_weights
        if not (tied and model.pre_process):
            source = "model.embed_tokens.weight" if tied else "lm_head.weight"
            found.append(Rule("output_layer.weight", (source,), 0))
    return found


def _attention_rules(mcore: str, hf: str, model: PolicyModel) -> Iterator[Rule]:
    attention = hf + "self_attn."
    yield Rule(mcore + "input_layernorm.weight", (hf + "input_layernorm.weight",), None)
    qkv = tuple(f"{attention}{x}_proj.weight" for x in "qkv")
    yield Rule(mcore + "self_attention.linear_qkv.weight", qkv, 0, "qkv")
    if model.config.qk_layernorm:
        yield Rule(mcore + "self_attention.q_layernorm.weight", (attention + "q_norm.weight",), None)
        yield Rule(mcore + "self_attention.k_layernorm.weight", (attention + "k_norm.weight",), None)
    yield Rule(mcore + "self_attention.linear_proj.weight", (attention + "o_proj.weight",), 1)
    yield Rule(mcore + "pre_mlp_layernorm.weight", (hf + "post_attention_layernorm.weight",), None)


def _mlp_rules(mcore: str, hf: str) -> Iterator[Rule]:
    gate_up = (hf + "mlp.gate_proj.weight", hf + "mlp.up_proj.weight")
    yield Rule(mcore + "mlp.linear_fc1.weight", gate_up, 0, "gate_up")
    yield Rule(mcore + "mlp.linear_fc2.weight", (hf + "mlp.down_proj.weight",), 1)


def _expert_rules(mcore: str, hf: str) -> Iterator[Rule]:
    yield Rule(mcore + "mlp.router", (hf + "mlp.gate.weight",), None)
    yield Rule(mcore + "mlp.gate_up", (hf + "mlp.experts.gate_up_proj",), 2, "experts")
    yield Rule(mcore + "mlp.down", (hf + "mlp.experts.down_proj",), 2)


def mark_shards(model: PolicyModel) -> None:
    """Tells Megatron which parameters are shards, so that the gradient norm counts replicated ones once. Megatron does
    this itself only when it initialises parameters."""
    parameters = dict(model.named_parameters())
    for rule in rules(model):
        parameter = parameters[rule.megatron]
        parameter.tensor_model_parallel = rule.axis is not None
        parameter.partition_dim = -1 if rule.axis is None else rule.axis
        parameter.partition_stride = 1


@torch.no_grad()
def scatter(model: PolicyModel, whole: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> None:
    """Fills `into` (Megatron name → this rank's tensor) from whole Hugging Face tensors. Raises WeightsUnavailable
    when some are missing, or when one has another shape; then `into` may be partly filled."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    found = rules(model)
    if missing := [name for rule in found for name in rule.hf if name not in whole]:
        raise experts.lacking(missing)
    for rule in found:
        tensors = [whole[name] for name in rule.hf]
        if rule.join == "experts":
            tensors = [tensor.view(len(tensor), 2, -1, tensor.shape[-1]) for tensor in tensors]
        parts = [_shard(tensor, rule.axis, rank, size) for tensor in tensors]
        joined = _join(parts, rule.join, model.config)
        target = into[rule.megatron]
        if joined.shape != target.shape:
            raise WeightsUnavailable(
                f"{', '.join(rule.hf)} give shape {tuple(joined.shape)}, but {rule.megatron} has {tuple(target.shape)}"
            )
        target.copy_(joined)


@torch.no_grad()
def gather(model: PolicyModel, local: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `scatter`: whole Hugging Face tensors from every rank's `local`, as copies in the host memory of
    the cell's rank 0, and empty elsewhere. Collective over the cell. A device holds one whole tensor at a time."""
    rank = dist.get_rank()
    sent: list[dict[str, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
    """Rank → what it sends to rank 0, as tensors without storage."""
    if len(sent) > 1:
        dist.all_gather_object(sent, _sent(model, local))
    whole: dict[str, torch.Tensor] = {}
    if parallel_state.get_data_parallel_rank() == 0:
        for name, tensor in _own_stage(model, local):
            if rank == 0:
                whole[name] = tensor.to("cpu", copy=True)
            elif name in sent[rank]:
                dist.send(tensor.contiguous(), 0)
    if rank == 0:
        for source, tensors in enumerate(sent):
            for name, tensor in tensors.items():
                received = torch.empty_like(tensor, device=model.device)
                dist.recv(received, source)
                # The first and the last stage both have tied embeddings.
                whole.setdefault(name, received.cpu())
    return whole


def _sent(model: PolicyModel, local: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The first rank of every stage but the first sends the tensors of its stage."""
    first = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_data_parallel_rank() == 0
    if dist.get_rank() == 0 or not first:
        return {}
    return dict(_own_stage(model, {name: tensor.to("meta") for name, tensor in local.items()}))


def _own_stage(model: PolicyModel, local: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole tensors of this rank's stage, one after the other; collective over its tensor-parallel ranks."""
    for rule in rules(model):
        for name, part in zip(rule.hf, _split(local[rule.megatron], rule.join, model.config), strict=True):
            tensor = _unshard(part, rule.axis)
            yield name, tensor.flatten(1, 2) if rule.join == "experts" else tensor


def _shard(tensor: torch.Tensor, axis: int | None, rank: int, size: int) -> torch.Tensor:
    return tensor if axis is None else tensor.chunk(size, dim=axis)[rank]


def _unshard(part: torch.Tensor, axis: int | None) -> torch.Tensor:
    size = parallel_state.get_tensor_model_parallel_world_size()
    if axis is None or size == 1:
        return part
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(size)]
    if not part.is_meta:
        dist.all_gather(parts, part.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, dim=axis)


def _join(parts: list[torch.Tensor], join: Join, config: Any) -> torch.Tensor:
    if join in ("one", "experts"):
        return parts[0]
    if join == "gate_up":
        return torch.cat(parts)
    q, k, v = parts
    # Megatron orders rows by query group: the group's query heads, its key head, its value head.
    dim, hidden = config.kv_channels, q.shape[1]
    groups = k.shape[0] // dim
    return torch.cat([x.reshape(groups, -1, hidden) for x in (q, k, v)], dim=1).reshape(-1, hidden)


def _split(tensor: torch.Tensor, join: Join, config: Any) -> list[torch.Tensor]:
    if join in ("one", "experts"):
        return [tensor]
    if join == "gate_up":
        return list(tensor.chunk(2))
    dim, hidden = config.kv_channels, tensor.shape[1]
    heads = config.num_attention_heads // config.num_query_groups
    grouped = tensor.reshape(-1, (heads + 2) * dim, hidden)
    return [x.reshape(-1, hidden) for x in torch.split(grouped, [heads * dim, dim, dim], dim=1)]
