"""The process of one local engine."""

import asyncio

from gyre.engines.base import Engine
from gyre.engines.local.config import LocalEngineConfig
from gyre.engines.local.engine import LocalEngine
from gyre.launch.base import WorkerContext
from gyre.rpc import serve
from gyre.transport.section import open_transport


async def main(config: LocalEngineConfig, context: WorkerContext) -> None:
    """Serves `Engine` at `context.address` until cancelled; raises what killed the generation thread."""
    transport = open_transport(config.transport, config.transport_root, context.name, context.host)
    engine = LocalEngine(config, transport)
    await engine.start()
    try:
        server = await serve(engine, Engine, context.address, context.secret)
        context.ready(server.address)
        try:
            await asyncio.shield(engine.failed)
        finally:
            await server.stop()
    finally:
        await engine.close()
