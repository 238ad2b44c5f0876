"""Which memory is registered with a transfer engine, asserted before every transfer.

TCP reads into memory that was never registered as if it were; RDMA refuses it. With this registry a missing
registration fails alike everywhere.
"""

import threading
from typing import Protocol

from gyre.core.errors import GyreError, InvariantViolation


class Registers(Protocol):
    """The part of Mooncake's `TransferEngine` that is used here; 0 means success."""

    def register_memory(self, address: int, length: int) -> int: ...

    def unregister_memory(self, address: int) -> int: ...


class Buffers:
    """May be used from several threads."""

    def __init__(self, engine: Registers) -> None:
        self._engine = engine
        self._lengths: dict[int, int] = {}
        self._lock = threading.Lock()

    def register(self, address: int, length: int) -> None:
        """Raises InvariantViolation when it overlaps a registered buffer, GyreError when the engine refuses."""
        with self._lock:
            for start, size in self._lengths.items():
                if address < start + size and start < address + length:
                    raise InvariantViolation(f"buffer {address:#x}+{length} overlaps registered {start:#x}+{size}")
            if self._engine.register_memory(address, length) != 0:
                raise GyreError(f"the transfer engine refused to register {length} bytes at {address:#x}")
            self._lengths[address] = length

    def unregister(self, address: int) -> None:
        with self._lock:
            if self._lengths.pop(address, None) is None:
                raise InvariantViolation(f"buffer {address:#x} is not registered")
            if self._engine.unregister_memory(address) != 0:
                raise GyreError(f"the transfer engine refused to unregister {address:#x}")

    def require(self, address: int, length: int) -> None:
        """Raises InvariantViolation unless the range lies inside one registered buffer."""
        with self._lock:
            inside = any(s <= address and address + length <= s + size for s, size in self._lengths.items())
        if not inside:
            raise InvariantViolation(f"transfer of {length} bytes at {address:#x} outside every registered buffer")
