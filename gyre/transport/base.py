"""Moving weights between processes: one writer publishes a version, readers pull exactly that version or fail."""

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from torch import Tensor


class WeightRef(msgspec.Struct, frozen=True, kw_only=True):
    """Handle of one immutable published snapshot."""

    version: int
    uri: str
    """Where a reader of the same transport finds it."""
    checksum: str
    """Digest over names, shapes, dtypes and bytes, in name order."""


class WeightTransport(Protocol):
    """Tensors carry Hugging Face names and whole (unsharded) shapes: one layout serves engines, satellites of any
    parallel layout, checkpoints and export."""

    def publish(self, version: int, tensors: "dict[str, Tensor]") -> WeightRef:
        """Makes a snapshot visible atomically. Later changes of the tensors do not show through."""
        ...

    def pull(self, ref: WeightRef) -> "dict[str, Tensor]":
        """The snapshot, verified. Raises WeightsUnavailable when it is gone or damaged, PeerLost when its
        publisher does not answer; never a mix of versions."""
        ...

    def fetch(self, ref: WeightRef) -> str:
        """Path of a safetensors file on this machine that holds the snapshot, verified; it may be mapped but not
        changed, and lives until this transport retires the version. Raises as `pull`, and PeerLost."""
        ...

    def retire(self, keep: set[int]) -> None:
        """Drops the snapshots of every version not in `keep`."""
        ...
