"""What a policy is made of, as data: sizes, layers and names of tensors. Pure: nothing here knows torch or a device.

`gyre.training.models.families` reads an `Architecture` out of a config.json. The trainer builds its layers from it, the
weight rules find their tensors by it, and the memory plan counts its parameters; there is no second description of a
model.
"""

from typing import Literal

import msgspec

from gyre.core.config import Positive

__all__ = ["Architecture", "Attention", "DeltaNet", "Experts", "Latent", "Layer"]


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """Softmax attention with grouped key-value heads."""

    heads: Positive
    groups: Positive
    """Key-value heads."""
    head_dim: Positive
    qk_norm: bool = False
    """Queries and keys are normalised per head."""
    gated: bool = False
    """q_proj has twice the rows: each head's query and the logits of a sigmoid gate of its output."""
    qkv_bias: bool = False
    output_bias: bool = False
    sinks: bool = False
    """A learned logit per head takes part in the softmax and attends to nothing."""


class Latent(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention: queries and key-values come out of low-rank projections."""

    heads: Positive
    query_rank: int | None
    """None: queries are projected at once."""
    kv_rank: Positive
    nope_dim: int
    """Dimensions of a query or key head without position."""
    rope_dim: Positive
    value_dim: Positive
    interleaved: bool
    """Pairs of rotary dimensions are neighbours, not halves."""


class DeltaNet(msgspec.Struct, frozen=True, kw_only=True):
    """Gated DeltaNet: a short causal convolution, then a recurrent state per value head."""

    key_heads: Positive
    value_heads: Positive
    key_dim: Positive
    value_dim: Positive
    kernel: Positive
    fused: bool
    """Names of the input projections: in_proj_qkvz and in_proj_ba, whose rows are grouped by key head; or one each."""


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """A sparse layer. The router's scores are `score` of its logits; the `chosen` largest win."""

    count: Positive
    chosen: Positive
    intermediate: Positive
    score: Literal["softmax", "sigmoid"]
    normalized: bool
    """The chosen scores are divided by their sum."""
    correction: bool = False
    """A frozen bias is added to the scores for the choice, not for the weights."""
    groups: int = 1
    """Experts are chosen from the best `chosen_groups` of so many groups."""
    chosen_groups: int = 1
    scaling: float = 1.0
    shared: int = 0
    """Intermediate size of what every token runs through besides; 0: nothing."""
    shared_gate: bool = False
    shared_name: str = "shared_expert"
    router_name: str = "gate"
    router_bias: bool = False
    clamped: tuple[float, float] | None = None
    """gpt-oss's activation: sigmoid gain and limit; gate and up columns alternate, and projections have biases."""


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    mixer: Literal["attention", "latent", "delta"]
    window: int | None = None
    """Keys that a query sees, itself included; None: all before it."""
    sparse: bool = False


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    family: str
    """model_type of the config.json."""
    hidden: Positive
    vocabulary: Positive
    positions: Positive
    """Longest context."""
    layers: tuple[Layer, ...]
    intermediate: int
    """Of dense layers."""
    norm_epsilon: float
    norm_offset: float = 0.0
    """Norms multiply by offset + weight; 1 where weights are stored around zero."""
    tied: bool
    prefix: str = "model."
    """Of the names of embedding, layers and final norm."""
    head: str = "lm_head.weight"
    rotary_dim: int
    """Dimensions of a head that carry the position."""
    attention: Attention | None = None
    latent: Latent | None = None
    delta: DeltaNet | None = None
    experts: Experts | None = None
    carried_layers: int = 0
    """Layers after the last one in the files, which predict further tokens and are not trained."""

    @property
    def cached_numbers(self) -> int:
        """Numbers that an engine keeps of each token of a context, without the states of linear attention."""
        of_layer = {"delta": 0}
        if self.attention is not None:
            of_layer["attention"] = 2 * self.attention.groups * self.attention.head_dim
        if self.latent is not None:
            of_layer["latent"] = self.latent.kv_rank + self.latent.rope_dim
        return sum(of_layer[layer.mixer] for layer in self.layers)

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Layers with experts, counted from 0; recorded choices name them in this order."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.sparse)
