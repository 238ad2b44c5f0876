"""Weights between machines: shared-memory snapshots, pulled by one-sided reads of the Mooncake Transfer Engine.

A publisher's snapshot is the file that `ShmTransport` writes, mapped and registered. A reader copies it into shared
memory of its own, which has no name unless a file was asked for, and verifies it there. No reader sees a mix: a
snapshot never changes, and what arrives must have the published digest. A retired one gives its memory back at once; a
read under way then ends on zeros, which have another digest.

Mooncake's TCP listeners accept connections on every interface, whatever `host` says: use it only inside a trusted
network or a network namespace.
"""

import contextlib
import mmap
import os
import queue
import socket
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import msgspec
import numpy as np

from gyre.core.clock import Clock, SystemClock
from gyre.core.errors import GyreError, PeerLost, WeightsUnavailable
from gyre.core.running_time import Silence
from gyre.transport.base import WeightRef
from gyre.transport.buffers import Buffers
from gyre.transport.heartbeat import Heartbeat, beating
from gyre.transport.section import MooncakeSection
from gyre.transport.shm import ShmTransport, verified

if TYPE_CHECKING:
    from torch import Tensor

Memory = np.memmap[tuple[int], np.dtype[np.uint8]]

PIECE = 256 << 10
"""Bytes of one read; progress is seen between two of them."""
LOOK_S = 0.1
"""Between two looks for signs of life."""
IN_FLIGHT = 8
"""Reads under way at a time. A large one alone waits long for its turns on a busy machine (docs/engines.md)."""


class Exposed(msgspec.Struct):
    """A snapshot that readers may read."""

    ref: WeightRef
    mapping: mmap.mmap
    address: int


class MooncakeTransport:
    """`WeightTransport`. `root` is this process's own directory in shared memory, `host` where other machines reach it.
    Raises GyreError when the transfer engine does not start. A dead publisher is seen at once; one that hangs, after
    `stall_s` without any bytes and any sign of life; one that lives and delivers nothing, after `deliver_s`."""

    def __init__(self, root: str, host: str, section: MooncakeSection, clock: Clock | None = None) -> None:
        from mooncake.engine import TransferEngine

        self._local = ShmTransport(root)
        self._engine = TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", section.protocol, section.device) != 0:
            raise GyreError(f"the Mooncake transfer engine did not start at {host} with protocol {section.protocol}")
        self._section = section
        self._clock = clock or SystemClock()
        self._pulse = beating(host)
        self._session = f"{host}:{self._engine.get_rpc_port()}"
        self._buffers = Buffers(self._engine)
        self._exposed: dict[str, Exposed] = {}
        """By digest and version."""
        self._leaving: list[Exposed] = []
        """Retired last time: without memory, but still mapped, because a read under way may touch them."""

    def publish(self, version: int, tensors: "dict[str, Tensor]") -> WeightRef:
        local = self._local.publish(version, tensors)
        known = self._exposed.get(local.uri)
        if known is not None:
            return known.ref
        with open(local.uri, "r+b") as file:
            mapping = mmap.mmap(file.fileno(), 0)
        address = np.frombuffer(mapping, np.uint8).ctypes.data
        self._buffers.register(address, len(mapping))
        uri = f"mooncake://{self._session}?address={address}&length={len(mapping)}&pulse={self._pulse}"
        ref = msgspec.structs.replace(local, uri=uri)
        self._exposed[local.uri] = Exposed(ref, mapping, address)
        return ref

    def pull(self, ref: WeightRef) -> "dict[str, Tensor]":
        # Without a name: nothing is left behind by a process that is killed.
        descriptor = os.memfd_create(f"gyre-v{ref.version}")
        try:
            return self._copy(ref, f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)

    def fetch(self, ref: WeightRef, target: Path) -> None:
        try:
            self._copy(ref, str(target))
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    def retire(self, keep: set[int]) -> None:
        self._leaving.clear()
        for path, exposed in list(self._exposed.items()):
            if exposed.ref.version not in keep:
                self._buffers.unregister(exposed.address)
                exposed.mapping.madvise(mmap.MADV_REMOVE)
                self._leaving.append(self._exposed.pop(path))
        self._local.retire(keep)

    def _copy(self, ref: WeightRef, path: str) -> "dict[str, Tensor]":
        """Fills the file with the snapshot and verifies it."""
        split = urlsplit(ref.uri)
        query = {name: int(values[0]) for name, values in parse_qs(split.query).items()}
        try:
            with open(path, "w+b") as file:
                os.posix_fallocate(file.fileno(), 0, query["length"])
        except OSError as error:
            raise WeightsUnavailable(f"no room for version {ref.version} of {ref.uri} in {path}: {error}") from error
        memory = np.memmap(path, dtype=np.uint8, mode="r+")
        self._buffers.register(memory.ctypes.data, memory.nbytes)
        with Heartbeat(split.hostname or "", query["pulse"], self._section.stall_s) as heartbeat:
            self._read(split.netloc, query["address"], memory, ref.version, heartbeat)
        return verified(ref, path)

    def _read(self, session: str, address: int, memory: Memory, version: int, heartbeat: Heartbeat) -> None:
        """Fills `memory`, which is registered and is not afterwards. A read cannot be cancelled and a stopped publisher
        never answers, so reads run on threads of their own, which keep the buffer for as long as they hang."""
        here = memory.ctypes.data
        self._buffers.require(here, memory.nbytes)
        starts = deque(range(0, memory.nbytes, PIECE))
        expected = len(starts)
        done: queue.SimpleQueue[int] = queue.SimpleQueue()

        def pieces() -> None:
            # Until none is left.
            with contextlib.suppress(IndexError):
                while True:
                    start = starts.popleft()
                    size = min(PIECE, memory.nbytes - start)
                    done.put(self._engine.transfer_sync_read(session, here + start, address + start, size))

        readers = [threading.Thread(target=pieces, name="mooncake-read", daemon=True) for _ in range(IN_FLIGHT)]

        def settle() -> None:
            for reader in readers:
                reader.join()
            self._buffers.unregister(here)

        for reader in readers:
            reader.start()
        try:
            self._wait(done, expected, session, version, heartbeat)
        except BaseException:
            starts.clear()
            threading.Thread(target=settle, name="mooncake-settle", daemon=True).start()
            raise
        settle()

    def _wait(
        self, done: "queue.SimpleQueue[int]", expected: int, session: str, version: int, heartbeat: Heartbeat
    ) -> None:
        """Returns when `expected` reads have ended well. Raises PeerLost or WeightsUnavailable."""
        now = self._clock.now()
        silent, idle = Silence(now, 2 * LOOK_S), Silence(now, 2 * LOOK_S)
        while expected:
            try:
                code = done.get(timeout=LOOK_S)
            except queue.Empty:
                read = False
            else:
                if code != 0:
                    raise _failure(session, version)
                read, expected = True, expected - 1
            now = self._clock.now()
            if silent.look(now, read or heartbeat.heard()) >= self._section.stall_s:
                raise PeerLost(
                    f"the publisher at {session} delivered nothing and gave no sign of life for "
                    f"{self._section.stall_s:g} s; it may hang"
                )
            if idle.look(now, read) >= self._section.deliver_s:
                raise PeerLost(
                    f"the publisher at {session} lives and delivered nothing for {self._section.deliver_s:g} s"
                )


def _failure(session: str, version: int) -> GyreError:
    """The engine's code tells no cause. A live publisher lets a connection wait; that of a dying one is closed."""
    host, _, port = session.rpartition(":")
    why = "its connections end"
    try:
        with socket.create_connection((host, int(port)), timeout=0.3) as connection:
            alive = bool(connection.recv(1))
    except TimeoutError:
        alive = True
    except OSError as error:
        alive, why = False, str(error)
    if not alive:
        return PeerLost(f"the publisher at {session} is gone ({why}); its weights cannot be pulled")
    return WeightsUnavailable(f"version {version} is gone: {session} does not offer it any more; pull a newer one")
