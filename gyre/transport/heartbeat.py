"""Signs of life of a publisher, beside the bytes that it delivers.

    publisher   one thread of the process writes a byte to every reader, each `BEAT_S`
    reader      connects for as long as it pulls, and looks whether bytes have come

A publisher that is stopped, or whose machine is gone, sends none. One that is only slow, because others have the
processor or its reads are large, sends them: the thread needs next to nothing, and so is served early.
"""

import contextlib
import functools
import selectors
import socket
import threading
from typing import Self

from gyre.core.errors import GyreError

BEAT_S = 0.1
BEAT = b"."


@functools.cache
def beating(host: str) -> int:
    """The port on `host` where this process gives signs of life for as long as it lives. Raises GyreError."""
    try:
        listener = socket.create_server((host, 0), backlog=128)
    except OSError as error:
        raise GyreError(f"no signs of life can be given at {host} ({error.strerror}): name an own address") from None
    listener.setblocking(False)
    threading.Thread(target=_beat, args=[listener], name="heartbeat", daemon=True).start()
    port: int = listener.getsockname()[1]
    return port


def _beat(listener: socket.socket) -> None:
    readers: list[socket.socket] = []
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        if selector.select(timeout=BEAT_S if readers else None):
            with contextlib.suppress(OSError):
                reader, _ = listener.accept()
                reader.setblocking(False)
                readers.append(reader)
        for reader in list(readers):
            try:
                reader.send(BEAT)
            except BlockingIOError:
                pass  # a reader that does not look yet
            except OSError:
                reader.close()
                readers.remove(reader)


class Heartbeat:
    """The reader's end; a context manager. Where nobody answers, nothing is ever heard."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError):
            self._socket = socket.create_connection((host, port), timeout=timeout_s)
            self._socket.setblocking(False)

    def heard(self) -> bool:
        """Whether there was a sign of life since the last look."""
        if self._socket is None:
            return False
        try:
            return bool(self._socket.recv(4096))
        except OSError:  # nothing has come, or nothing will
            return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()
