"""Buckets: every tensor once, bounded, aligned, and bit-equal when they are taken apart."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.engines.sglang.buckets import cut, flatten

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64]
SHAPES = st.lists(st.integers(1, 9), max_size=3)


@st.composite
def snapshots(draw) -> dict[str, torch.Tensor]:
    kinds = draw(st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1, max_size=12))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensors = {}
    for i, (dtype, shape) in enumerate(kinds):
        size = torch.Size(shape).numel() * dtype.itemsize
        tensors[f"t{i}"] = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=seed).view(dtype).reshape(shape)
    return tensors


@settings(max_examples=100)
@given(snapshots(), st.integers(1, 2000))
def test_buckets_hold_every_tensor_once_bounded_aligned_and_bit_equal(tensors, limit):
    found = {}
    for bucket in cut(tensors, limit):
        flat = flatten(bucket, tensors, torch.device("cpu"))
        assert flat.numel() <= limit or len(bucket.names) == 1
        start = 0
        for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
            kind = getattr(torch, dtype)
            assert start % kind.itemsize == 0
            end = start + torch.Size(shape).numel() * kind.itemsize
            assert name not in found
            found[name] = flat[start:end].view(kind).reshape(shape)
            start = end
        assert start == flat.numel()
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_a_bucket_is_filled_before_the_next_one():
    tensors = {name: torch.zeros(10) for name in "abcde"}
    assert [bucket.names for bucket in cut(tensors, 100)] == [["a", "b"], ["c", "d"], ["e"]]
    assert next(iter(cut({"big": torch.zeros(99), **tensors}, 100))).names == ["big"]
