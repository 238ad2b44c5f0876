"""Token paths of recent calls, packed, which the next call of each agent extends instead of copying.

A call names its prompt as a path that is already stored here plus its new ids; the flat prompt is made once, when the
request is sent.
"""

from array import array
from collections.abc import Iterable

from gyre.core.tokens import TokenIds
from gyre.trajectory.node import Node, path_tokens


class PathIds:
    """The first `len(self)` ids of an array that later calls may have extended; what it shows never changes."""

    __slots__ = ("_ids", "_length")

    def __init__(self, ids: "Iterable[int] | array[int]") -> None:
        """Takes an array over."""
        self._ids = ids if isinstance(ids, array) else array("i", ids)
        self._length = len(self._ids)

    def __len__(self) -> int:
        return self._length

    def slice(self, start: int, stop: int | None = None) -> list[int]:
        """`start` and `stop` are not negative."""
        return self._ids[start : self._length if stop is None else min(stop, self._length)].tolist()

    def followed_by(self, ids: list[int]) -> TokenIds:
        """A flat copy of this path and `ids`."""
        # The views are let go at once: while there is one, the array cannot be extended.
        with memoryview(self._ids) as view, view[: self._length] as path:
            return TokenIds(b"".join((path, array("i", ids))))

    def extended(self, ids: list[int]) -> "PathIds":
        """This path followed by `ids`: in place, unless another call has extended this path before."""
        own = self._ids if len(self._ids) == self._length else self._ids[: self._length]
        own.extend(ids)
        return PathIds(own)


class RecentPaths:
    """The latest path of each branch that calls go on with. Derived data only: results never depend on what is kept.

    Successive paths share one array, so the ids of an agent's whole life are held once."""

    def __init__(self, limit_tokens: int = 500_000) -> None:
        self._limit = limit_tokens
        self._paths: dict[str, PathIds] = {}

    def put(self, call_id: str, path: PathIds, replaces: str | None) -> None:
        """`replaces` names the call that this path continues; a later branch from there collects its path again."""
        if replaces is not None:
            self._paths.pop(replaces, None)
        self._paths[call_id] = path
        while len(self._paths) > 1 and sum(map(len, self._paths.values())) > self._limit:
            del self._paths[next(iter(self._paths))]

    def get(self, node: Node) -> PathIds:
        kept = self._paths.get(node.call_id)
        return kept if kept is not None else PathIds(array("i", path_tokens(node, node.end).tobytes()))
