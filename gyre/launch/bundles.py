"""Which node of a cluster takes which bundle. Pure."""

from collections.abc import Mapping, Sequence

import msgspec

from gyre.core.errors import GyreError


class SameFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that must have the same content on the bundle's machine as here."""

    path: str
    fingerprint: str
    """`gyre.launch.files.fingerprint` of it here."""
    hint: str
    """What to do when it has not, in words."""


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """What processes that share a machine and its devices need of it."""

    gpus: int
    cpus: float
    here: bool = False
    """Prefers the launcher's own machine."""
    files: list[SameFile] = []


class ClusterNode(msgspec.Struct, frozen=True, kw_only=True):
    """A machine of the cluster, with what is free on it."""

    id: str
    host: str
    """Where the other machines reach it."""
    here: bool
    gpus: float
    cpus: float


class NoRoom(GyreError):
    """A bundle fits on no node."""


def assign(nodes: Sequence[ClusterNode], bundles: Mapping[str, Bundle]) -> dict[str, ClusterNode]:
    """A node for each bundle, in the order of `bundles`: its own machine if it prefers that and fits there, else the
    node with the most free GPUs, then CPUs, then the first. Raises NoRoom naming the bundle that fits nowhere."""
    free = {node.id: (node.gpus, node.cpus) for node in nodes}
    chosen: dict[str, ClusterNode] = {}
    for name, bundle in bundles.items():
        fitting = [node for node in nodes if free[node.id][0] >= bundle.gpus and free[node.id][1] >= bundle.cpus]
        if not fitting:
            have = ", ".join(f"{node.host} {_amount(*free[node.id])}" for node in nodes)
            raise NoRoom(
                f"{name} needs {_amount(bundle.gpus, bundle.cpus)} on one node, and no node has that free; "
                f"free are: {have or 'no nodes'}"
            )
        node = max(fitting, key=lambda node: (bundle.here and node.here, free[node.id]))
        gpus, cpus = free[node.id]
        free[node.id] = (gpus - bundle.gpus, cpus - bundle.cpus)
        chosen[name] = node
    return chosen


def _amount(gpus: float, cpus: float) -> str:
    return f"{gpus:g} GPUs and {cpus:g} CPUs"
