"""Rank 0 of a process group with the tensor-parallel ranks of one SGLang server.

The server builds its side with `init_custom_process_group`; this side repeats what that does to the store (0.5.23 with
torch 2.13: the group's name as prefix, again with a slash, then the device type).
"""

from datetime import timedelta

import torch
from torch._C import _distributed_c10d as c10d

from gyre.core.errors import WeightsUnavailable
from gyre.transport.groups import make_group
from gyre.transport.rendezvous import cause, connect_store


def backend_of(device: torch.device) -> str:
    """Host memory goes over gloo, to servers on any device; device memory over NCCL."""
    return "nccl" if device.type == "cuda" else "gloo"


class SendGroup:
    """Blocks until all ranks have met. Every wait is at most `timeout_s`; then, as after any other failure,
    WeightsUnavailable is raised and the group is of no use any more."""

    def __init__(self, name: str, address: str, ranks: int, device: torch.device, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        host = address.rpartition(":")[0]
        try:
            store = c10d.PrefixStore(name, connect_store(address, timeout_s))
            store = c10d.PrefixStore(f"{device.type}/", c10d.PrefixStore(f"{name}/", store))
            self._group = make_group(store, 0, ranks + 1, device, host, timeout_s)
        except RuntimeError as error:
            raise WeightsUnavailable(
                f"the {ranks} ranks of the engine did not meet the sender: {cause(error)}"
            ) from error

    def broadcast(self, flat: torch.Tensor) -> None:
        """Returns when the bytes have left; that all ranks took them is for the server to say."""
        options = c10d.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        try:
            self._group.broadcast([flat], options).wait(self._timeout)
        except RuntimeError as error:
            raise WeightsUnavailable(f"the broadcast to the engine's ranks broke: {cause(error)}") from error

    def abort(self) -> None:
        """Ends what NCCL has under way. A gloo broadcast cannot be ended; it has its timeout."""
        self._group.abort()
