"""The tensors of an architecture: names and shapes as its files have them, with what each is split over. Pure.

Preflight compares files with it and the memory plan counts with it; `megatron/weights.py` says where each lies.
"""

import math
from collections.abc import Iterator
from typing import Literal

import msgspec

from gyre.training.models.architecture import Architecture, Experts

Split = Literal["tensor", "groups", "expert", "none"]
"""Over which ranks: tensor-parallel ones, those that have different key-value heads, expert-parallel ones, or none."""


class Declared(msgspec.Struct, frozen=True):
    name: str
    shape: tuple[int, ...]
    split: Split = "tensor"
    layer: int | None = None
    """Counted from 0; None for embedding, final norm and output."""
    trained: bool = True

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


def tensors_of(model: Architecture, apart: bool = True) -> Iterator[Declared]:
    """All tensors that the trainer has. `apart`: experts have a tensor each, where the family allows both."""
    yield Declared(model.prefix + "embed_tokens.weight", (model.vocabulary, model.hidden))
    for number, layer in enumerate(model.layers):
        name = f"{model.prefix}layers.{number}."
        parts = [Declared(name + "input_layernorm.weight", (model.hidden,), "none")]
        parts += {"attention": _attention, "latent": _latent, "delta": _delta}[layer.mixer](model, name)
        parts.append(Declared(name + "post_attention_layernorm.weight", (model.hidden,), "none"))
        if layer.sparse:
            parts += _sparse(model, name + "mlp.", apart)
        else:
            parts += _mlp(name + "mlp.", model.hidden, model.intermediate)
        yield from (msgspec.structs.replace(part, layer=number) for part in parts)
    yield Declared(model.prefix + "norm.weight", (model.hidden,), "none")
    if not model.tied:
        yield Declared(model.head, (model.vocabulary, model.hidden))


def _attention(model: Architecture, layer: str) -> list[Declared]:
    sizes, name = model.attention, layer + "self_attn."
    assert sizes is not None
    queries, keys = sizes.heads * sizes.head_dim, sizes.groups * sizes.head_dim
    rows: tuple[tuple[str, int, Split], ...] = (
        ("q_proj", queries * (2 if sizes.gated else 1), "tensor"),
        ("k_proj", keys, "groups"),
        ("v_proj", keys, "groups"),
    )
    found = [Declared(f"{name}{part}.weight", (count, model.hidden), split) for part, count, split in rows]
    if sizes.qkv_bias:
        found += [Declared(f"{name}{part}.bias", (count,), split) for part, count, split in rows]
    found.append(Declared(name + "o_proj.weight", (model.hidden, queries)))
    if sizes.output_bias:
        found.append(Declared(name + "o_proj.bias", (model.hidden,), "none"))
    if sizes.qk_norm:
        found += [Declared(f"{name}{part}_norm.weight", (sizes.head_dim,), "none") for part in "qk"]
    if sizes.sinks:
        found.append(Declared(name + "sinks", (sizes.heads,)))
    return found


def _latent(model: Architecture, layer: str) -> list[Declared]:
    sizes, name, hidden = model.latent, layer + "self_attn.", model.hidden
    assert sizes is not None
    queries = sizes.heads * (sizes.nope_dim + sizes.rope_dim)
    if sizes.query_rank is None:
        found = [Declared(name + "q_proj.weight", (queries, hidden))]
    else:
        found = [
            Declared(name + "q_a_proj.weight", (sizes.query_rank, hidden), "none"),
            Declared(name + "q_a_layernorm.weight", (sizes.query_rank,), "none"),
            Declared(name + "q_b_proj.weight", (queries, sizes.query_rank)),
        ]
    return [
        *found,
        Declared(name + "kv_a_proj_with_mqa.weight", (sizes.kv_rank + sizes.rope_dim, hidden), "none"),
        Declared(name + "kv_a_layernorm.weight", (sizes.kv_rank,), "none"),
        Declared(name + "kv_b_proj.weight", (sizes.heads * (sizes.nope_dim + sizes.value_dim), sizes.kv_rank)),
        Declared(name + "o_proj.weight", (hidden, sizes.heads * sizes.value_dim)),
    ]


def _delta(model: Architecture, layer: str) -> list[Declared]:
    sizes, name, hidden = model.delta, layer + "linear_attn.", model.hidden
    assert sizes is not None
    keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
    rows = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * sizes.value_heads}
    if not sizes.fused:
        heads = sizes.value_heads
        rows = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    return [
        *(Declared(f"{name}{part}.weight", (count, hidden)) for part, count in rows.items()),
        Declared(name + "conv1d.weight", (2 * keys + values, 1, sizes.kernel)),
        Declared(name + "A_log", (sizes.value_heads,)),
        Declared(name + "dt_bias", (sizes.value_heads,)),
        Declared(name + "norm.weight", (sizes.value_dim,), "none"),
        Declared(name + "out_proj.weight", (hidden, values)),
    ]


def _mlp(name: str, hidden: int, inner: int, split: Split = "tensor") -> list[Declared]:
    return [
        Declared(name + "gate_proj.weight", (inner, hidden), split),
        Declared(name + "up_proj.weight", (inner, hidden), split),
        Declared(name + "down_proj.weight", (hidden, inner), split),
    ]


def _sparse(model: Architecture, name: str, apart: bool) -> list[Declared]:
    sizes, hidden = model.experts, model.hidden
    assert sizes is not None
    router = name + sizes.router_name
    found = [Declared(router + ".weight", (sizes.count, hidden), "none")]
    if sizes.router_bias:
        found.append(Declared(router + ".bias", (sizes.count,), "none"))
    if sizes.correction:
        found.append(Declared(router + ".e_score_correction_bias", (sizes.count,), "none", trained=False))
    if sizes.shared:
        found += _mlp(f"{name}{sizes.shared_name}.", hidden, sizes.shared)
        if sizes.shared_gate:
            found.append(Declared(name + "shared_expert_gate.weight", (1, hidden), "none"))
    if apart and sizes.clamped is None:
        for expert in range(sizes.count):
            found += _mlp(f"{name}experts.{expert}.", hidden, sizes.intermediate, "expert")
        return found
    return [*found, *_together(name + "experts.", hidden, sizes)]


def _together(name: str, hidden: int, sizes: Experts) -> list[Declared]:
    count, inner = sizes.count, sizes.intermediate
    if sizes.clamped is None:
        shapes: dict[str, tuple[int, ...]] = {
            "gate_up_proj": (count, 2 * inner, hidden),
            "down_proj": (count, hidden, inner),
        }
    else:
        shapes = {
            "gate_up_proj": (count, hidden, 2 * inner),
            "gate_up_proj_bias": (count, 2 * inner),
            "down_proj": (count, inner, hidden),
            "down_proj_bias": (count, hidden),
        }
    return [Declared(name + part, shape, "expert") for part, shape in shapes.items()]
