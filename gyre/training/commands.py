"""The command stream of a cell with several ranks: its leader writes, its other ranks follow (DESIGN §7).

Lives in the rendezvous store and not in a process group: a rank may wait here for hours, and nobody posts a receive
before the stream says that data are coming. The controller talks to the leader (rank 0) only.
"""

from collections.abc import Callable
from datetime import timedelta

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistStoreError

from gyre.core.errors import GyreError

_POLL = timedelta(seconds=2)
"""How often a waiting rank looks whether the cell has failed; the wait itself ends as soon as the key appears."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the trainer's life cycle."""

    method: str
    arguments: bytes


class CommandStream:
    """One reader or writer of a cell's commands and answers. Not thread-safe: one per thread, with its own client."""

    def __init__(self, store: Store, cell: int, incarnation: int) -> None:
        self._store = PrefixStore(f"commands/{cell}/{incarnation}", store)
        self._next = 0

    def append(self, command: Command) -> int:
        """Leader: makes the next command visible; returns its number."""
        number = self._next
        # The stub says str; the store takes any bytes.
        self._store.set(f"command/{number}", msgspec.msgpack.encode(command))  # type: ignore[arg-type]
        self._next += 1
        return number

    def next(self) -> tuple[int, Command]:
        """Follower: waits for the next command however long it takes."""
        number = self._next
        data = self._wait(f"command/{number}", lambda: None)
        self._next += 1
        return number, msgspec.msgpack.decode(data, type=Command)

    def answer(self, number: int, data: bytes) -> None:
        """The rank that has the result of a command publishes it."""
        self._store.set(f"answer/{number}", data)  # type: ignore[arg-type]

    def wait_answer(self, number: int) -> bytes:
        """Leader: the answer to a command. Raises GyreError when a rank of the cell has failed meanwhile."""
        data = self._wait(f"answer/{number}", self._raise_failure)
        for key in ("command", "answer"):
            self._store.delete_key(f"{key}/{number}")
        return data

    def fail(self, message: str) -> None:
        """A rank that cannot go on says why; the whole cell is lost."""
        self._store.set("failed", message)

    def _raise_failure(self) -> None:
        if self._store.check(["failed"]):
            raise GyreError(f"the cell has lost a rank and must be restarted: {self._store.get('failed').decode()}")

    def _wait(self, key: str, watch: Callable[[], None]) -> bytes:
        while True:
            try:
                self._store.wait([key], _POLL)
            except DistStoreError:
                watch()
            else:
                return self._store.get(key)
