"""How many ranks an SGLang engine of a model may have."""

import contextlib

import msgspec
import pytest

from gyre.control.live.fit import require_servable
from gyre.core.errors import ConfigError
from gyre.engines.sglang.config import SglangSection
from gyre.training.models.families import read_architecture

MODEL = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 24,
}


def allowed(shared: int | None, **engine: object) -> set[int]:
    """Of 1 to 24 ranks."""
    found = set()
    for tensor in range(1, 25):
        section = msgspec.convert({"kind": "sglang", "python": "python", "tensor": tensor, **engine}, SglangSection)
        with contextlib.suppress(ConfigError):
            require_servable(section, read_architecture({**MODEL, "num_key_value_heads": shared}, "model"), "model")
            found.add(tensor)
    return found


@pytest.mark.parametrize(
    ("shared", "ranks"),
    [(8, {1, 2, 4, 8, 24}), (None, {1, 2, 3, 4, 6, 8, 12, 24}), (3, {1, 3, 6, 12, 24})],
)
def test_ranks_share_out_attention_heads_and_share_out_or_copy_key_value_heads(
    shared: int | None, ranks: set[int]
) -> None:
    assert allowed(shared) == ranks


def test_attention_of_its_own_layout_is_left_to_sglang() -> None:
    assert allowed(8, args={"enable-dp-attention": True, "dp-size": 2}) == set(range(1, 25))
