"""Where bundles go. Pure."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.launch.bundles import Bundle, ClusterNode, NoRoom, assign

GPUS = st.integers(0, 4)
NODES = st.lists(st.tuples(GPUS, st.integers(0, 4), st.booleans()), max_size=4).map(
    lambda sizes: [
        ClusterNode(id=f"n{i}", host=f"10.0.0.{i}", here=here, gpus=gpus, cpus=cpus)
        for i, (gpus, cpus, here) in enumerate(sizes)
    ]
)
PLACES = st.lists(st.tuples(GPUS, st.integers(1, 2), st.booleans()), max_size=6).map(
    lambda sizes: {f"cell-{i}": Bundle(gpus=gpus, cpus=cpus, here=here) for i, (gpus, cpus, here) in enumerate(sizes)}
)


def node(name: str, gpus: float = 0, cpus: float = 8, here: bool = False) -> ClusterNode:
    return ClusterNode(id=name, host=f"host-{name}", here=here, gpus=gpus, cpus=cpus)


@given(NODES, PLACES)
def test_no_node_gives_more_than_it_has_and_a_refusal_is_true_of_the_place_that_it_names(
    nodes: list[ClusterNode], bundles: dict[str, Bundle]
) -> None:
    try:
        chosen = assign(nodes, bundles)
    except NoRoom as error:
        name = str(error).partition(" ")[0]
        before = list(bundles)[: list(bundles).index(name)]
        placed = assign(nodes, {earlier: bundles[earlier] for earlier in before})
        gpus, cpus = Counter[str](), Counter[str]()
        for earlier, node in placed.items():
            gpus[node.id] += bundles[earlier].gpus
            cpus[node.id] += bundles[earlier].cpus
        want = bundles[name]
        assert all(n.gpus - gpus[n.id] < want.gpus or n.cpus - cpus[n.id] < want.cpus for n in nodes)
        return
    assert list(chosen) == list(bundles)
    for node in nodes:
        mine = [bundles[name] for name, at in chosen.items() if at == node]
        assert sum(bundle.gpus for bundle in mine) <= node.gpus
        assert sum(bundle.cpus for bundle in mine) <= node.cpus


def test_the_core_is_on_this_machine_if_it_fits_and_the_others_spread() -> None:
    bundles = {
        "cell-0": Bundle(gpus=2, cpus=1, here=True),
        "cell-1": Bundle(gpus=2, cpus=1),
        "pool-1": Bundle(gpus=2, cpus=1),
    }
    big, mine = node("big", gpus=4), node("mine", gpus=2, here=True)
    assert assign([big, mine], bundles) == {"cell-0": mine, "cell-1": big, "pool-1": big}
    assert assign([big, node("mine", here=True), node("third", gpus=2)], bundles) == {
        "cell-0": big,
        "cell-1": node("third", gpus=2),
        "pool-1": big,
    }


def test_what_does_not_fit_is_named_with_what_is_free() -> None:
    bundles = {"cell-0": Bundle(gpus=1, cpus=1), "cell-1": Bundle(gpus=2, cpus=1)}
    with pytest.raises(NoRoom, match=r"cell-1 needs 2 GPUs and 1 CPUs on one node.*host-a 1 GPUs and 7 CPUs, host-b 1"):
        assign([node("a", gpus=2), node("b", gpus=1)], bundles)
    with pytest.raises(NoRoom, match="free are: no nodes"):
        assign([], {"cell-0": Bundle(gpus=0, cpus=1)})
