"""Typed RPC between Gyre's processes: a `Protocol` class is the service, msgspec the wire format, gRPC the transport.

    class Engine(Protocol):
        async def abort(self, request_id: str) -> None: ...                       # unary
        def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]: ...  # server stream

    server = await serve(LocalEngine(...), Engine, address, secret)
    engine = connect(Engine, address, secret)     # satisfies Engine; cancellation and deadlines cross the wire

Addresses are `unix:/path` or `127.0.0.1:port`. Every call carries the secret of the run.
"""

import os

# gRPC's C core prints a line for every closed connection; the callers' typed errors say it better. Read at its import.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from gyre.rpc.client import Connection, connect
from gyre.rpc.server import Server, serve

__all__ = ["Connection", "Server", "connect", "serve"]
