"""Gives the memory of tensors back while keeping the tensor objects, their views and everything that refers to them.

Process groups, modules and optimizers survive a role transition; only storages come and go (docs/transitions.md).
"""

from collections.abc import Iterable

import torch


class HostOffload:
    """A set of tensors whose storages can be released and brought back. Starts occupied (not released)."""

    def __init__(self) -> None:
        self._parked: list[tuple[torch.Tensor, int, torch.Tensor | None]] = []

    @property
    def released(self) -> bool:
        return bool(self._parked)

    def release(self, tensors: Iterable[torch.Tensor], keep: bool) -> None:
        """Frees the device storages of `tensors`; with `keep` their content waits in host memory.

        Kept tensors that already live in host memory stay where they are. A storage shared by several of the tensors
        must be passed once.
        """
        for tensor in tensors:
            if keep and tensor.device.type == "cpu":
                continue
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            self._parked.append((tensor, size, tensor.detach().cpu() if keep else None))
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @torch.no_grad()
    def restore(self) -> None:
        """Allocates the storages again. Content comes back where it was kept and is undefined elsewhere."""
        for tensor, size, kept in self._parked:
            tensor.untyped_storage().resize_(size)
            if kept is not None:
                tensor.copy_(kept)
        self._parked.clear()
