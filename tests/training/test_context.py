"""Context parallelism without processes: how packs are shared out, and that shares of attention are the whole's."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.training.megatron.layers.attend import attend_flash, attend_masked
from gyre.training.megatron.layers.context import queries_of, share_out
from gyre.training.megatron.layers.flex import attend_flex, tree_mask
from gyre.training.megatron.layers.nodes import TreeStretch, cut


def random_pack(rng: random.Random, multiple: int) -> tuple[tuple[TreeStretch, ...], torch.Tensor]:
    """Nodes in depth-first order, adjacent ancestors joined as the layout does, and the depth of each token."""
    nodes: list[TreeStretch] = []
    depths: list[int] = []

    def grow(above: tuple[tuple[int, int], ...], depth: int, level: int) -> None:
        start, length = len(depths), rng.randrange(1, 50)
        depths.extend(range(depth, depth + length))
        nodes.append(TreeStretch(start, start + length, above))
        joins = bool(above) and above[-1][1] == start
        mine = (*above[:-1], (above[-1][0], start + length)) if joins else (*above, (start, start + length))
        for _ in range(rng.randrange(0, 4) if level < 3 else 0):
            grow(mine, depth + length, level + 1)

    for _ in range(rng.randrange(1, 4)):
        grow((), 0, 0)
    if missing := -len(depths) % multiple:
        nodes.append(TreeStretch(len(depths), len(depths) + missing))
        depths.extend([0] * missing)
    return tuple(nodes), torch.tensor(depths)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1, 2, 4]))
def test_ranks_share_out_every_token_once_and_equally_many(seed: int, ranks: int, multiple: int) -> None:
    nodes, depths = random_pack(random.Random(seed), ranks * multiple)
    share = share_out(nodes, ranks, multiple)
    assert sorted(i for ranges in share.ranges for a, b in ranges for i in range(a, b)) == list(range(len(depths)))
    counts = {sum(b - a for a, b in ranges) for ranges in share.ranges}
    assert counts == {share.tokens}
    assert share.tokens % multiple == 0
    for ranges in share.ranges:
        assert list(ranges) == sorted(ranges)
        queries = queries_of(cut(nodes, [x for pair in ranges for x in pair]), ranges)
        places = [i for q in queries for i in range(q.start, q.start + q.node.end - q.node.start)]
        assert places == list(range(share.tokens))
    areas = [sum(q.node.seen for q in queries_of(cut(nodes, [x for p in r for x in p]), r)) for r in share.ranges]
    assert sum(areas) == sum(node.seen for node in nodes)


def test_the_areas_of_the_mask_are_about_equal_where_halves_would_not_be() -> None:
    """One long row: its later half has three times the work of its earlier one."""
    nodes = (TreeStretch(0, 4096),)
    for ranks in (2, 4):
        share = share_out(nodes, ranks, 2)
        areas = [sum(q.node.seen for q in queries_of(cut(nodes, [x for p in r for x in p]), r)) for r in share.ranges]
        assert max(areas) <= 1.05 * min(areas)


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("seed", range(4))
def test_shares_of_attention_and_their_gradients_are_those_of_the_whole_in_fp64(seed: int, window: int | None) -> None:
    nodes, depths = random_pack(random.Random(seed), 8)
    torch.manual_seed(seed)
    length = len(depths)
    inputs = [torch.randn(1, h, length, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]
    weight = torch.randn(1, 4, length, 8, dtype=torch.float64)
    q, k, v = inputs
    everything = queries_of(nodes, ((0, length),))
    whole = attend_masked(everything, q, k, v, 0.3, None, depths, window)
    expected = torch.autograd.grad((whole * weight).sum(), inputs)
    share = share_out(nodes, 4, 2)
    found = [torch.zeros_like(x) for x in inputs]
    for ranges in share.ranges:
        index = torch.cat([torch.arange(a, b) for a, b in ranges])
        queries = queries_of(cut(nodes, [x for pair in ranges for x in pair]), ranges)
        mine = q[:, :, index]
        if window is None:
            out = attend_flash(queries, mine, k, v, 0.3)
        else:
            out = attend_masked(queries, mine, k, v, 0.3, None, depths, window)
        assert torch.allclose(out, whole[:, :, index], rtol=1e-10, atol=1e-12)
        for total, part in zip(found, torch.autograd.grad((out * weight[:, :, index]).sum(), inputs), strict=True):
            total += part
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-11) for a, b in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("window", "sinks"), [(None, False), (40, False), (40, True), (None, True)])
@pytest.mark.parametrize("seed", range(3))
def test_what_a_gpu_is_given_attends_to_the_same_with_shares_windows_and_sinks(
    seed: int, window: int | None, sinks: bool
) -> None:
    rng = random.Random(seed)
    nodes, depths = random_pack(rng, 8)
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, h, len(depths), 16) for h in (4, 2, 2))
    sink = torch.randn(4) if sinks else None
    for ranges in share_out(nodes, 2, 4).ranges:
        index = torch.cat([torch.arange(a, b) for a, b in ranges])
        queries = queries_of(cut(nodes, [x for pair in ranges for x in pair]), ranges)
        mask = tree_mask(nodes, depths, window, index)
        with torch.no_grad():
            expected = attend_masked(queries, q[:, :, index], k, v, 0.3, sink, depths, window)
            found = attend_flex(mask, q[:, :, index], k, v, 0.3, sink)
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
