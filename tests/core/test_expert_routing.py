import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.core.errors import InvariantViolation
from gyre.core.expert_routing import ExpertRouting, expert_count, id_type, joined, sparse_layers


def make(experts: int, positions: int, seed: int, layers: int = 3, chosen: int = 2) -> ExpertRouting:
    """Random choices; about a third of the positions are absent."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(id_type(experts, chosen))
    first = rng.integers(0, experts, (positions, layers, 1))
    ids = ((first + np.arange(chosen)) % experts).astype(kind)  # the k of a token differ
    ids[rng.random(positions) < 0.33] = np.iinfo(kind).max
    return ExpertRouting(layers, chosen, experts, ids.tobytes())


@settings(max_examples=60)
@given(st.sampled_from([2, 128, 255, 256, 257, 60_000]), st.integers(0, 12), st.integers(0, 12), st.integers(0, 999))
def test_parts_join_to_the_whole_and_travel_unchanged(experts: int, positions: int, cut: int, seed: int) -> None:
    whole = make(experts, positions, seed)
    cut = min(cut, positions)
    assert whole.positions == positions
    assert joined([whole.part(0, cut), whole.part(cut)]) == whole
    assert whole.replaced(whole.choices()) == whole
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(whole), type=ExpertRouting) == whole
    longer = whole.of_length(positions + 3)
    assert longer.part(0, positions) == whole
    assert longer.known().tolist() == [*whole.known().tolist(), False, False, False]
    assert longer.of_length(cut) == whole.part(0, cut)


def test_an_id_takes_one_byte_where_it_fits_beside_the_mark_of_absence() -> None:
    assert [np.dtype(id_type(experts, 2)).itemsize for experts in (128, 255, 256, 257)] == [1, 1, 1, 2]
    assert [np.dtype(id_type(experts, 1)).itemsize for experts in (255, 256)] == [1, 2]
    assert make(256, 4, 0).width == 6
    last = np.array([[[255, 254]] * 3, [[255, 255]] * 3], dtype=np.uint8)
    assert ExpertRouting(3, 2, 256, last.tobytes()).known().tolist() == [True, False]


def test_what_is_no_choice_is_refused() -> None:
    with pytest.raises(InvariantViolation, match="7 bytes are no choices of 2 experts out of 9 in 3 layers"):
        ExpertRouting(3, 2, 9, b"\x00" * 7)
    for data in (b"\x09\x01", b"\xff\x01"):
        with pytest.raises(InvariantViolation, match="none of 9 experts"):
            ExpertRouting(1, 2, 9, data).known()
    with pytest.raises(InvariantViolation, match="different models"):
        joined([make(9, 1, 0), make(10, 1, 0)])


def test_experts_are_counted_under_both_names(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3MoeConfig

    for config, count in ((Qwen3MoeConfig(num_experts=5), 5), (Qwen3Config(), 0)):
        config.save_pretrained(tmp_path)
        assert expert_count(json.loads((tmp_path / "config.json").read_text())) == count
    assert expert_count({"num_experts": 128}) == 128


def test_layers_with_experts_are_those_of_transformers() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes = {"hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 8, "num_experts": 2}
    for dense, step in (([], 1), ([2], 1), ([1], 2), ([], 3)):
        config = Qwen3MoeConfig(**sizes, num_hidden_layers=6, mlp_only_layers=dense, decoder_sparse_step=step)
        layers = Qwen3MoeForCausalLM(config).model.layers
        theirs = [i for i, layer in enumerate(layers) if isinstance(layer.mlp, Qwen3MoeSparseMoeBlock)]
        assert sparse_layers(6, dense, step) == theirs
