"""Weights between processes of one machine: safetensors files in shared memory.

A snapshot is one file in `root`, the publisher's own directory, best under /dev/shm. It is written under a temporary
name and renamed, so a reader sees a whole file or none; its name carries the version and the digest, so a file is never
rewritten with other content. Readers map the file instead of copying it: a mapping outlives the snapshot's retirement.
"""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from gyre.core.errors import GyreError, WeightsUnavailable
from gyre.transport.base import WeightRef
from gyre.transport.state import checksum

if TYPE_CHECKING:
    from torch import Tensor

_SUFFIX = ".safetensors"


class ShmTransport:
    """`WeightTransport` over files that the processes of a machine share. Creates the directory (mode 0700)."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def publish(self, version: int, tensors: "dict[str, Tensor]") -> WeightRef:
        """Writes the snapshot of `version` (≥ 0) and returns its handle. Publishing the same content again is free.
        Raises GyreError when there is no room."""
        if version < 0:
            raise ValueError(f"version {version} cannot be published: versions count optimizer steps from 0")
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        digest = checksum(whole)
        target = self.root / f"v{version:08d}-{digest}{_SUFFIX}"
        if not target.exists():
            partial = self.root / f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}"
            try:
                save_file(whole, partial)
                os.replace(partial, target)
            except (OSError, SafetensorError) as error:
                raise GyreError(
                    f"version {version} could not be published in {self.root} ({error}): it takes "
                    f"{sum(tensor.nbytes for tensor in whole.values()) >> 20} MiB of shared memory; make room"
                ) from error
            finally:
                partial.unlink(missing_ok=True)
        return WeightRef(version=version, uri=str(target), checksum=digest)

    def pull(self, ref: WeightRef) -> "dict[str, Tensor]":
        return verified(ref, ref.uri)

    def fetch(self, ref: WeightRef, target: Path) -> None:
        verified(ref, ref.uri)
        target.symlink_to(ref.uri)

    def retire(self, keep: set[int]) -> None:
        for version, file in self._snapshots():
            if version not in keep:
                file.unlink(missing_ok=True)

    def _snapshots(self) -> Iterator[tuple[int, Path]]:
        for file in self.root.glob(f"v*{_SUFFIX}"):
            yield int(file.name[1:].partition("-")[0]), file


def verified(ref: WeightRef, path: str) -> "dict[str, Tensor]":
    """The content of the file as tensors that map it (private: writing to them changes no other reader). Raises
    WeightsUnavailable when it is not what was published as `ref`."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except FileNotFoundError:
        raise WeightsUnavailable(f"version {ref.version} is gone: {ref.uri} does not exist; pull a newer one") from None
    except (OSError, SafetensorError) as error:
        raise WeightsUnavailable(f"version {ref.version} at {ref.uri} cannot be read: {error}") from error
    found = checksum(tensors)
    if found != ref.checksum:
        raise WeightsUnavailable(
            f"version {ref.version} at {ref.uri} is damaged: digest {found}, published as {ref.checksum}"
        )
    return tensors
