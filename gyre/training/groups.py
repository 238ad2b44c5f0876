"""Prefix groups: the process groups over which cells 0..k−1 sum their gradients to the core (docs/training.md).

Groups are raw ones (`transport.groups`) on a rendezvous store that the controller serves, because membership changes
while the world of a cell must not. A group is named by (generation, k): the controller raises the generation
after a failure, since a broken group is dead for good. One group per prefix exists at most, made at first use.

Recovery first meet in the store, so that one who is dead or late is missed by name before any data moves. Then the
gradients are summed bucket by bucket, so that the memory this takes does not grow with the model.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from gyre.core.errors import GroupBroken
from gyre.transport.groups import make_group
from gyre.transport.rendezvous import cause

BUCKET_BYTES = 64 << 20
IN_FLIGHT = 2
"""Buckets under way at a time: one travels while the next is made."""


class PrefixGroups:
    """The groups of one training rank. Rank r of every cell has its own groups, named by `shard` = r. `device` is
    where the gradients are; on CUDA every cell must have devices of its own."""

    def __init__(
        self,
        store: c10d.TCPStore,
        cell: int,
        shard: int,
        host: str,
        device: torch.device,
        timeout_s: float,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._store = store
        self._cell = cell
        self._shard = shard
        self._host = host
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._bucket_bytes = bucket_bytes
        self._groups: dict[tuple[int, int], Any] = {}
        self._meetings: dict[tuple[int, int], int] = {}
        """Reductions so far by (generation, members); a member that missed one never meets the others again."""

    def sum_to_core(self, generation: int, members: int, tensors: Sequence[torch.Tensor]) -> None:
        """Sums `tensors` of cells 0..members−1 into those of the core; all of them call this with equal, contiguous
        tensors.

        On the core the tensors become the sums, in place: a second copy of all gradients would not fit where the first
        one just does. Elsewhere they are never changed. Raises GroupBroken when not every member takes part within the
        timeout; the core's tensors are then partly summed, and the caller puts them back.
        """
        if not 0 <= self._cell < members:
            raise GroupBroken(f"cell {self._cell} is not among the members 0..{members - 1} of this reduction")
        started = time.monotonic()
        try:
            self._meet(generation, members)
            self._reduce(self._group(generation, members), tensors)
        except RuntimeError as error:
            self._drop((generation, members))
            raise GroupBroken(
                f"cell {self._cell} waited {time.monotonic() - started:.1f} s for the gradients of cells "
                f"0..{members - 1} in generation {generation}: {cause(error)}"
            ) from error

    def _reduce(self, group: Any, tensors: Sequence[torch.Tensor]) -> None:
        options = c10d.ReduceOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        under_way: deque[tuple[Any, torch.Tensor]] = deque()
        try:
            for bucket in buckets(tensors, self._bucket_bytes):
                if len(under_way) == IN_FLIGHT:
                    under_way[0][0].wait(self._timeout)
                    under_way.popleft()
                # Gloo's reduce leaves partial sums in the tensor of every member.
                piece = bucket if self._cell == 0 else bucket.clone()
                under_way.append((group.reduce([piece], options), piece))
            for work, _ in under_way:
                work.wait(self._timeout)
        except RuntimeError:
            # What is under way must have ended before the caller puts the tensors back.
            group.abort()
            for work, _ in under_way:
                with contextlib.suppress(RuntimeError):
                    work.wait(self._timeout)
            raise

    def _meet(self, generation: int, members: int) -> None:
        """Returns when all members have come to this reduction. Raises RuntimeError naming those who have not."""
        number = self._meetings.get((generation, members), 0)
        self._meetings[generation, members] = number + 1
        store = c10d.PrefixStore(f"{self._name(generation, members)}/meeting", self._store)
        store.set(f"{number}/{self._cell}", "")
        everyone = [f"{number}/{cell}" for cell in range(members)]
        try:
            store.wait(everyone, self._timeout)
        except RuntimeError as error:
            absent = [cell for cell, key in enumerate(everyone) if not store.check([key])]
            raise RuntimeError(f"no sign of cells {', '.join(map(str, absent))}") from error
        # All have left the meeting before.
        store.delete_key(f"{number - 1}/{self._cell}")

    def _group(self, generation: int, members: int) -> Any:
        key = (generation, members)
        if key not in self._groups:
            # Older generations will not be used again.
            for old in [old for old in self._groups if old[0] != generation]:
                self._drop(old)
            self._meetings = {k: number for k, number in self._meetings.items() if k[0] == generation}
            store = c10d.PrefixStore(self._name(generation, members), self._store)
            seconds = self._timeout.total_seconds()
            self._groups[key] = make_group(store, self._cell, members, self._device, self._host, seconds)
        return self._groups[key]

    def _name(self, generation: int, members: int) -> str:
        return f"cells/{generation}/{members}/{self._shard}"

    def _drop(self, key: tuple[int, int]) -> None:
        """Closes the connections of a group, whoever still waits on them."""
        group = self._groups.pop(key, None)
        if group is not None:
            group.abort()


def buckets(tensors: Sequence[torch.Tensor], limit: int) -> Iterator[torch.Tensor]:
    """Views of at most `limit` bytes, but one element at least, that together are `tensors`. Flat and in order, so they
    match between cells."""
    for tensor in tensors:
        flat, size = tensor.detach().view(-1), max(1, limit // tensor.element_size())
        for start in range(0, flat.numel(), size):
            yield flat[start : start + size]
