"""Token ids as packed integers: a prompt of 100k ids is copied, sent and compared in microseconds, not milliseconds."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import xxhash


class TokenIds(Sequence[int]):
    """A read-only sequence of token ids. Equal to any sequence with the same ids; slices and sums are lists.

    `packed` is little-endian int32, [T]; it is also how the ids travel between processes."""

    __slots__ = ("_view", "packed")

    def __init__(self, ids: "Iterable[int] | bytes | TokenIds" = ()) -> None:
        """Bytes are taken as packed ids. Raises ValueError when they are not whole, OverflowError for an id that does
        not fit."""
        if isinstance(ids, bytes):
            self.packed = ids
        elif isinstance(ids, TokenIds):
            self.packed = ids.packed
        else:
            self.packed = array("i", ids).tobytes()
        if len(self.packed) % 4:
            raise ValueError(f"{len(self.packed)} bytes are no packed token ids: each takes four.")
        self._view = memoryview(self.packed).cast("i")

    @property
    def digest(self) -> bytes:
        """What two processes compare instead of sending the ids twice: XXH3 of `packed`, 16 bytes. Against mistakes,
        not against somebody who looks for a collision."""
        return xxhash.xxh3_128_digest(self.packed)

    def tolist(self) -> list[int]:
        return self._view.tolist()

    def __len__(self) -> int:
        return len(self._view)

    def __iter__(self) -> Iterator[int]:
        return iter(self._view)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._view[index].tolist() if isinstance(index, slice) else self._view[index]

    def __add__(self, more: Sequence[int]) -> list[int]:
        return [*self._view.tolist(), *more]

    def __eq__(self, other: Any) -> bool:
        if isinstance(other, TokenIds):
            return self.packed == other.packed
        return isinstance(other, list | tuple) and self.tolist() == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TokenIds({self.tolist()})"
