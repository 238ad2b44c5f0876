"""The command stream of a cell with several ranks: its leader writes, its other ranks follow (docs/training.md).

Lives in the rendezvous store and not in a process group: a rank may wait here for hours, and nobody posts a receive
before the stream says that data are coming. The controller talks to the leader (rank 0) only.
"""

from datetime import timedelta

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistStoreError

from gyre.core.errors import PeerLost

_POLL = timedelta(seconds=60)
"""The store logs a warning at the end of every unsuccessful wait; a wait ends as soon as the key appears."""
_OK, _FAILED = b"+", b"-"
PART = 4 * 2**20
"""Bytes of one value: the store drops a client that sends more than 8 MiB, and rows with their experts may be more."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the trainer's life cycle."""

    method: str
    arguments: bytes


class CommandStream:
    """One reader or writer of a cell's commands and answers. Not thread-safe: one per thread, with its own client.
    The last of `followers` to read a command deletes it."""

    def __init__(self, store: Store, cell: int, incarnation: int, followers: int) -> None:
        self._store = PrefixStore(f"commands/{cell}/{incarnation}", store)
        self._followers = followers
        self._next = 0
        self._failure = ""

    def append(self, command: Command) -> int:
        """Leader: makes the next command visible; returns its number."""
        number = self._next
        data = msgspec.msgpack.encode(command)
        parts = range(0, len(data), PART)
        for i, start in enumerate(parts):
            # The stub says str; the store takes any bytes.
            self._store.set(f"command/{number}/{i}", data[start : start + PART])  # type: ignore[arg-type]
        self._store.set(f"command/{number}", str(len(parts)))
        self._next += 1
        return number

    def next(self) -> tuple[int, Command]:
        """Follower: waits for the next command however long it takes."""
        number = self._next
        name = f"command/{number}"
        parts = [f"{name}/{i}" for i in range(int(self._wait(name)))]
        data = b"".join(map(self._store.get, parts))
        if self._store.add(f"{name}/readers", 1) == self._followers:
            for key in (name, *parts, f"{name}/readers"):
                self._store.delete_key(key)
        self._next += 1
        return number, msgspec.msgpack.decode(data, type=Command)

    def answer(self, number: int, data: bytes) -> None:
        """The rank that has the result of a command publishes it."""
        self._store.set(f"answer/{number}", _OK + data)  # type: ignore[arg-type]

    def fail(self, number: int, message: str) -> None:
        """A rank that cannot go on says why, as the answer to the command that it failed in."""
        self._store.set(f"answer/{number}", _FAILED + message.encode())  # type: ignore[arg-type]

    def wait_answer(self, number: int) -> bytes:
        """Leader: the answer to a command, asked for in the order of the commands. Raises PeerLost when a rank of the
        cell has failed; a rank that died without a word is noticed by whoever watches its process."""
        if not self._failure:
            answer = self._wait(f"answer/{number}")
            self._store.delete_key(f"answer/{number}")
            if answer.startswith(_OK):
                return answer[len(_OK) :]
            self._failure = answer[len(_FAILED) :].decode()
        raise PeerLost(f"the cell must be restarted: {self._failure}")

    def _wait(self, key: str) -> bytes:
        while True:
            try:
                self._store.wait([key], _POLL)
            except DistStoreError:
                continue
            return self._store.get(key)
