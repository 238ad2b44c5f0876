"""Moving weights between processes: one writer publishes a version, readers pull exactly that version or fail."""

from pathlib import Path
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
        """Makes a snapshot visible atomically. Later changes of the tensors do not show through. Raises GyreError when
        there is no room for it."""
        ...

    def pull(self, ref: WeightRef) -> "dict[str, Tensor]":
        """The snapshot, verified. Raises WeightsUnavailable when it is gone or damaged, PeerLost when its
        publisher does not answer; never a mix of versions. Memory that this takes goes with the tensors."""
        ...

    def fetch(self, ref: WeightRef, target: Path) -> None:
        """Makes `target`, best in shared memory, a safetensors file with the snapshot, verified, or a link to one. It
        may be mapped but not changed; the caller removes it. Raises as `pull`, and then there is no `target`."""
        ...

    def retire(self, keep: set[int]) -> None:
        """Drops what this transport itself has published, but for the versions in `keep`, and frees its memory."""
        ...
