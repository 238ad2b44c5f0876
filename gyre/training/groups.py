"""Prefix groups: the process groups over which cells 0..k−1 sum their gradients to the core (DESIGN §7).

Groups are raw gloo groups on a rendezvous store that the controller serves. They are not registered with
torch.distributed's world, because membership changes while the world of a cell must not (notes/training.md §6). A group
is named by (generation, k): the controller raises the generation after a failure, since a broken group is dead for
good. One group per prefix exists at most, made at first use, when all its members are known to be alive.
"""

import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from gyre.core.errors import ConfigError, GroupBroken


class StoreServer:
    """The rendezvous store, served by the controller for as long as this object lives. Listens on `host` only."""

    def __init__(self, host: str) -> None:
        with socket.create_server((host, 0)) as listener:
            self.address = f"{host}:{listener.getsockname()[1]}"
            port = listener.getsockname()[1]
            self._store = c10d.TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
            )


def connect_store(address: str, timeout_s: float) -> c10d.TCPStore:
    """A client of the store at host:port. Raises ConfigError when nobody serves it."""
    host, _, port = address.rpartition(":")
    try:
        return c10d.TCPStore(host, int(port), wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"no rendezvous store answers at {address!r}: {error}") from error


class PrefixGroups:
    """The groups of one training rank. Rank r of every cell has its own groups, named by `shard` = r."""

    def __init__(self, store: c10d.TCPStore, cell: int, shard: int, host: str, timeout_s: float) -> None:
        self._store = store
        self._cell = cell
        self._shard = shard
        self._host = host
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[tuple[int, int], Any] = {}

    def sum_to_core(self, generation: int, members: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sums `tensors` of cells 0..members−1; all of them call this with equal shapes.

        Returns the sums on the core and an empty list elsewhere; `tensors` are never changed. Raises GroupBroken when
        not every member takes part within the timeout.
        """
        if not 0 <= self._cell < members:
            raise GroupBroken(f"cell {self._cell} is not among the members 0..{members - 1} of this reduction")
        staged = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        started = time.monotonic()
        options = c10d.ReduceOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        try:
            group = self._group(generation, members)
            for tensor in staged:
                group.reduce([tensor], options).wait(self._timeout)
        except RuntimeError as error:
            self._groups.pop((generation, members), None)
            raise GroupBroken(
                f"cell {self._cell} waited {time.monotonic() - started:.1f} s for the gradients of cells "
                f"0..{members - 1} in generation {generation}: {_cause(error)}"
            ) from error
        return staged if self._cell == 0 else []

    def _group(self, generation: int, members: int) -> Any:
        key = (generation, members)
        if key not in self._groups:
            # Older generations will not be used again; dropping a group closes its connections.
            self._groups = {k: group for k, group in self._groups.items() if k[0] == generation}
            gloo: Any = c10d.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=self._host)]
            options._timeout = self._timeout
            prefix = f"cells/{generation}/{members}/{self._shard}"
            self._groups[key] = gloo(c10d.PrefixStore(prefix, self._store), self._cell, members, options)
        return self._groups[key]


def _cause(error: RuntimeError) -> str:
    """Gloo's message without its source location and advice."""
    text = str(error).splitlines()[0]
    return text.split("] ", 1)[-1].split(" This is typically", 1)[0]
