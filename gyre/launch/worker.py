"""Entry of every worker process: `python -m gyre.launch.worker`, the order on standard input.

The first line of stdin is a `WorkerOrder`. The pipe then stays open for as long as the supervisor lives: its end of
file means that nobody is left to want this worker, and the worker ends too. SIGTERM asks for an orderly end.
"""

import asyncio
import contextlib
import gc
import importlib
import inspect
import logging
import os
import signal
import sys
import typing
from typing import cast

import msgspec

from gyre.core.errors import ConfigError
from gyre.core.programs import raise_open_files
from gyre.launch.base import WorkerContext, WorkerMain, WorkerOrder, decode_config

log = logging.getLogger("gyre.worker")


def load_entry(entry: str) -> tuple[WorkerMain, type[msgspec.Struct]]:
    """Resolves `package.module:function`; the type of its first parameter is the worker's config."""
    module, _, name = entry.partition(":")
    function = getattr(importlib.import_module(module), name)
    first = next(iter(inspect.signature(function).parameters))
    return cast(WorkerMain, function), typing.get_type_hints(function)[first]


async def _run(order: WorkerOrder) -> None:
    function, config_type = load_entry(order.entry)
    config = decode_config(order.config, config_type)

    def ready(address: str) -> None:
        # Modules and models live as long as the process: without this, each full collection walks all of them again,
        # a third of a second in which the worker does nothing else.
        gc.collect()
        gc.freeze()
        os.write(order.ready_fd, f"{address}\n".encode())
        os.close(order.ready_fd)

    context = WorkerContext(name=order.name, address=order.address, host=order.host, secret=order.secret, ready=ready)
    main = asyncio.ensure_future(function(config, context))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, main.cancel)
    supervisor = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(supervisor), sys.stdin)
    watch = asyncio.ensure_future(supervisor.read())
    await asyncio.wait({main, watch}, return_when=asyncio.FIRST_COMPLETED)
    if not main.done():
        log.warning("%s: the supervisor is gone, ending", order.name)
        main.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await main
    watch.cancel()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # Ctrl-C reaches the whole terminal group; the supervisor decides the order in which things end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Shells allow 1024 open files; a proxy holds several connections for every execution.
    raise_open_files()
    # Read exactly one line without buffering past it: the rest of the pipe is the supervisor's life line.
    line = bytearray()
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    try:
        asyncio.run(_run(msgspec.json.decode(bytes(line), type=WorkerOrder)))
    except ConfigError as error:
        # The supervisor shows the end of the log: to a user a sentence, without where in the code it comes from.
        sys.exit(str(error))


if __name__ == "__main__":
    main()
