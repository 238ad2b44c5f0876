"""Headers and numbers of safetensors files."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from gyre.core.system.tensor_files import DamagedFile, non_finite, read_header


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tensors") / "model.safetensors"
    save_file({"a": np.ones((3, 5), np.float32), "b": np.ones((7,), np.float16), "c": np.arange(4)}, file)
    return file


def test_a_header_tells_names_types_and_shapes(whole: Path) -> None:
    found = read_header(whole)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == {
        "a": ("F32", (3, 5)),
        "b": ("F16", (7,)),
        "c": ("I64", (4,)),
    }
    assert non_finite(found, 2**20) is None


@given(cut=st.integers(0, 10_000))
@settings(max_examples=60)
def test_a_file_that_was_cut_anywhere_is_damaged(whole: Path, cut: int) -> None:
    content = whole.read_bytes()
    shorter = whole.with_name("cut.safetensors")
    shorter.write_bytes(content[: cut % len(content)])
    with pytest.raises(DamagedFile):
        read_header(shorter)


@given(data=st.binary(max_size=300))
@settings(max_examples=60)
def test_any_other_file_is_damaged_and_raises_nothing_else(whole: Path, data: bytes) -> None:
    other = whole.with_name("other.safetensors")
    other.write_bytes(len(data).to_bytes(8, "little") + data)
    with pytest.raises(DamagedFile):
        read_header(other)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_not_finite_is_found_anywhere(tmp_path: Path, dtype: type, value: float) -> None:
    for place in (0, 499, 999):
        numbers = np.ones(1000, dtype)
        numbers[place] = value
        save_file({"fine": np.full(10, -6e4, dtype), "bad": numbers}, tmp_path / "m.safetensors")
        assert non_finite(read_header(tmp_path / "m.safetensors"), 2**20) == "bad"


def test_a_large_tensor_is_sampled_within_the_budget(tmp_path: Path) -> None:
    numbers = np.ones(1_000_000, np.float32)
    numbers[::1000] = np.nan
    save_file({"large": numbers, "small": np.ones(3, np.float32)}, tmp_path / "m.safetensors")
    assert non_finite(read_header(tmp_path / "m.safetensors"), 100_000) == "large"
    numbers[:] = 1
    numbers[-1] = np.inf
    save_file({"large": numbers}, tmp_path / "m.safetensors")
    assert non_finite(read_header(tmp_path / "m.safetensors"), 1000) == "large"
