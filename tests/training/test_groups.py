"""Sums over prefix groups of gloo: any tensors in any buckets; a member that is missing or leaves half-way."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.core.errors import GroupBroken
from gyre.training.groups import PrefixGroups, buckets
from gyre.transport.rendezvous import StoreServer, connect_store

CELLS = 3
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64]

Shapes = st.lists(
    st.tuples(st.lists(st.integers(0, 7), min_size=1, max_size=3), st.sampled_from(DTYPES)), min_size=1, max_size=5
)


class Recovery:
    """The groups of all cells in one process, a thread for each call."""

    def __init__(self, store: StoreServer, timeout_s: float) -> None:
        self.groups = [
            PrefixGroups(connect_store(store.address, 20.0), cell, 0, "127.0.0.1", CPU, timeout_s)
            for cell in range(CELLS)
        ]
        self._generation = 0
        self._threads = ThreadPoolExecutor(CELLS)

    def next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def use_buckets(self, limit: int) -> None:
        for groups in self.groups:
            groups._bucket_bytes = limit

    def together(self, *calls: Callable[[], None]) -> list[BaseException | None]:
        return [future.exception() for future in [self._threads.submit(call) for call in calls]]


@pytest.fixture(scope="module")
def store() -> StoreServer:
    """Other tests use the same generations."""
    return StoreServer("127.0.0.1")


@pytest.fixture(scope="module")
def members(store: StoreServer) -> Recovery:
    return Recovery(store, timeout_s=20.0)


@pytest.fixture
def impatient(store: StoreServer) -> Recovery:
    found = Recovery(store, timeout_s=0.5)
    found._generation = 10_000
    return found


def make(shapes: Sequence[tuple[list[int], torch.dtype]], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-9, 10, shape, generator=generator).to(dtype) for shape, dtype in shapes]


def clones(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


def equal(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@settings(max_examples=40)
@given(Shapes, st.integers(1, 200), st.integers(2, CELLS), st.booleans())
def test_any_tensors_in_any_buckets_are_summed_on_the_core_only(members, shapes, limit, count, again):
    members.use_buckets(limit)
    # Also over a group that has been used.
    generation = members._generation if again and members._generation else members.next_generation()
    inputs = [make(shapes, seed) for seed in range(count)]
    held = [clones(each) for each in inputs]
    calls = [
        lambda c=c: members.groups[c].sum_to_core(generation, count, held[c])  # type: ignore[misc]
        for c in range(count)
    ]
    assert members.together(*calls) == [None] * count
    assert equal(held[0], [sum(parts[1:], parts[0]) for parts in zip(*inputs, strict=True)])
    for cell in range(1, count):
        assert equal(held[cell], inputs[cell])


@given(Shapes, st.integers(1, 64))
def test_buckets_are_the_tensors_in_order_and_bounded(shapes, limit):
    tensors = make(shapes, 0)
    found = list(buckets(tensors, limit))
    assert all(bucket.nbytes <= max(limit, bucket.element_size()) for bucket in found)
    for bucket in found:
        bucket.add_(1)
    assert equal(tensors, [tensor + 1 for tensor in make(shapes, 0)])
    assert sum(bucket.numel() for bucket in found) == sum(tensor.numel() for tensor in tensors)


def test_a_member_that_does_not_come_is_named_and_nothing_is_changed(impatient):
    generation, inputs = impatient.next_generation(), make([([5], torch.float32)], 1)
    held = [clones(inputs), clones(inputs)]
    errors = impatient.together(
        lambda: impatient.groups[0].sum_to_core(generation, 3, held[0]),
        lambda: impatient.groups[2].sum_to_core(generation, 3, held[1]),
    )
    for error in errors:
        assert isinstance(error, GroupBroken)
        assert f"cells 0..2 in generation {generation}: no sign of cells 1" in str(error)
    assert equal(held[0], inputs)
    assert equal(held[1], inputs)
    # The missing one comes late, and finds nobody: the generation is over.
    with pytest.raises(GroupBroken):
        impatient.groups[1].sum_to_core(generation, 3, clones(inputs))
    again = impatient.next_generation()
    sums = [clones(inputs) for _ in range(CELLS)]
    calls = [lambda c=c: impatient.groups[c].sum_to_core(again, 3, sums[c]) for c in range(CELLS)]  # type: ignore[misc]
    assert impatient.together(*calls) == [None] * CELLS
    assert equal(sums[0], [3 * tensor for tensor in inputs])


@settings(max_examples=8)
@given(at=st.integers(0, 5), leaver=st.sampled_from([0, 1]))
def test_a_member_that_leaves_between_two_buckets_breaks_the_group(store, at, leaver):
    """At any bucket, the core or a satellite: the other one gets the error, and a satellite's tensors are as before."""
    pair = Recovery(store, timeout_s=2.0)
    pair._generation = 20_000 + 10 * at + leaver
    pair.use_buckets(8)
    generation, inputs = pair.next_generation(), make([([12], torch.float32)], 1)
    stays, leaves = pair.groups[1 - leaver], pair.groups[leaver]
    held = clones(inputs)

    def leave() -> None:
        leaves.sum_to_core(generation, 2, [clones(inputs)[0][: 2 * at]])
        leaves._drop((generation, 2))

    error, none = pair.together(lambda: stays.sum_to_core(generation, 2, held), leave)
    assert none is None
    assert isinstance(error, GroupBroken)
    assert leaver == 1 or equal(held, inputs)
