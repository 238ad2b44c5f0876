"""The process of one local engine."""

import asyncio

from gyre.engines.base import Engine
from gyre.engines.local.config import LocalEngineConfig
from gyre.engines.local.engine import LocalEngine
from gyre.launch.base import WorkerContext
from gyre.launch.serving import serving_rpc
from gyre.transport.section import open_transport


async def main(config: LocalEngineConfig, context: WorkerContext) -> None:
    """Serves `Engine` at `context.address` until cancelled; raises what killed the generation thread."""
    transport = open_transport(config.transport, config.transport_root, context.name, context.host)
    engine = LocalEngine(config, transport)
    try:
        # Also an engine that is cancelled while it starts has threads, which `close` ends.
        await engine.start()
        async with serving_rpc(engine, Engine, context):
            await asyncio.shield(engine.failed)
    finally:
        await engine.close()
