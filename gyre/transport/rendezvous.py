"""The rendezvous store of process groups: served by one process, on one address, for the members of those groups."""

import os
import socket
from datetime import timedelta

from torch._C import _distributed_c10d as c10d

from gyre.core.errors import ConfigError


class StoreServer:
    """A store, served for as long as this object lives. Listens on `host` only."""

    def __init__(self, host: str) -> None:
        with socket.create_server((host, 0)) as listener:
            self.address = f"{host}:{listener.getsockname()[1]}"
            port = listener.getsockname()[1]
            self._store = c10d.TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
            )


def connect_store(address: str, timeout_s: float) -> c10d.TCPStore:
    """A client of the store at host:port. Raises ConfigError when nobody serves it."""
    host, _, port = address.rpartition(":")
    try:
        return c10d.TCPStore(host, int(port), wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"no rendezvous store answers at {address!r}: {error}") from error


def cause(error: RuntimeError) -> str:
    """Torch's message without its source location and advice."""
    text = str(error).splitlines()[0]
    return text.split("] ", 1)[-1].split(" This is typically", 1)[0]
