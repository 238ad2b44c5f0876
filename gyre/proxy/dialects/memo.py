"""Elements of a request that were read before: harnesses send their whole history with every call.

An element (a message, an item, the list of tools) is known by its bytes. Reading it again would cost more than the rest
of the call; and since what is remembered is shared, equal elements of later requests are identical objects, which makes
comparing histories cheap.

Bytes are looked up by a fast 128-bit hash under a secret of the session. A harness that found two texts of one hash
would only be read as having repeated itself.
"""

import secrets
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Any, Generic, TypeVar

import msgspec
from xxhash import xxh3_128_digest

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
        self._secret = secrets.randbits(64)
        self._used = 0
        self._recent: _Known = {}
        self._older: _Known = {}

    def read(self, reader: Reader[T], raw: msgspec.Raw, where: str) -> Element[T]:
        """`reader(raw, where)`, or what it returned for these bytes before. When it raises, nothing is remembered."""
        key = (reader, xxh3_128_digest(raw, self._secret))
        return self._recent.get(key) or self._read(key, raw, where)

    def read_each(self, reader: Reader[T], raws: Iterable[msgspec.Raw], where: str) -> list[Element[T]]:
        """`read` for every element of a list. Nearly all of a long history is known."""
        elements = []
        for index, raw in enumerate(raws):
            key = (reader, xxh3_128_digest(raw, self._secret))
            elements.append(self._recent.get(key) or self._read(key, raw, f"{where}[{index}]"))
        return elements

    def _read(self, key: tuple[Reader[T], bytes], raw: msgspec.Raw, where: str) -> Element[T]:
        reader, _ = key
        element = self._older.get(key)
        if element is None:
            value = reader(raw, where)
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
