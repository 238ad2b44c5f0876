"""Token paths of recent calls as flat lists, which the next call of each agent extends instead of copying.

An engine wants a prompt as one list, and a list of 200k ids costs a millisecond to copy. So a call names its prompt as
a path that is already stored here plus its new ids; the flat list is made once, when the request is sent.
"""

from gyre.trajectory.node import Node, path_tokens


class PathIds:
    """The first `len(self)` ids of a list that later calls may have extended; what it shows never changes."""

    __slots__ = ("_ids", "_length")

    def __init__(self, ids: list[int]) -> None:
        """Takes the list over."""
        self._ids = ids
        self._length = len(ids)

    def __len__(self) -> int:
        return self._length

    def slice(self, start: int, stop: int | None = None) -> list[int]:
        """`start` and `stop` are not negative."""
        return self._ids[start : self._length if stop is None else min(stop, self._length)]

    def extended(self, ids: list[int]) -> "PathIds":
        """This path followed by `ids`: in place, unless another call has extended this path before."""
        own = self._ids if len(self._ids) == self._length else self.slice(0)
        own += ids
        return PathIds(own)


class RecentPaths:
    """The latest path of each branch that calls go on with. Derived data only: results never depend on what is kept.

    Successive paths share one list, so the ids of an agent's whole life are held once."""

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
        return kept if kept is not None else PathIds(path_tokens(node, node.end).tolist())
