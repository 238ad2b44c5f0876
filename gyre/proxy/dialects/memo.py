"""Elements of a request that were read before: harnesses send their whole history with every call.

An element (a message, an item, the list of tools) is known by its bytes. Reading it again would cost more than the rest
of the call; and since what is remembered is shared, equal elements of later requests are identical objects, which makes
comparing histories cheap.
"""

from collections.abc import Callable
from hashlib import blake2b, sha256
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

# JSON, not msgpack: it can hold integers of any size.
_canonical = msgspec.json.Encoder(order="deterministic")


class Element(msgspec.Struct, Generic[T], frozen=True):
    value: T
    """Canonical and never changed."""
    digest: bytes
    """Equal for elements that mean the same, however they were spelled."""
    size: int
    """Bytes of what it says, as JSON."""


Reader = Callable[[msgspec.Raw, str], T]
"""A function of a module: reads an element; the text names its place in the request, for errors."""

_Known = dict[tuple[Reader[Any], bytes], Element[Any]]


class Memo:
    """What one session has read. Bounded: what no request of the latest `limit_bytes` has used is forgotten."""

    def __init__(self, limit_bytes: int = 32 * 2**20) -> None:
        self._limit = limit_bytes
        self._used = 0
        self._recent: _Known = {}
        self._older: _Known = {}

    def read(self, reader: Reader[T], raw: msgspec.Raw, place: str) -> Element[T]:
        """`reader(raw, place)`, or what it returned for these bytes before. When it raises, nothing is remembered."""
        key = (reader, sha256(raw).digest())
        known = self._recent.get(key)
        if known is not None:
            return known
        element = self._older.get(key)
        if element is None:
            value = reader(raw, place)
            canonical = _canonical.encode(value)
            element = Element(value, blake2b(canonical, digest_size=16).digest(), len(canonical))
        self._recent[key] = element
        self._used += memoryview(raw).nbytes
        if self._used > self._limit:
            self._older, self._recent, self._used = self._recent, {}, 0
        return element


def identity(*digests: bytes) -> bytes:
    """One digest for a sequence of elements."""
    return blake2b(b"".join(digests), digest_size=16).digest()
