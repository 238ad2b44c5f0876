"""The process of one SGLang engine: its server as a child, and `Engine` in front of it."""

import asyncio
import shutil
import tempfile
from pathlib import Path

from gyre.engines.base import Engine
from gyre.engines.sglang.client import SglangClient
from gyre.engines.sglang.config import SglangEngineConfig
from gyre.engines.sglang.engine import SglangEngine
from gyre.engines.sglang.server import serving
from gyre.engines.sglang.weights import ModelDirs
from gyre.launch.base import WorkerContext
from gyre.rpc import serve
from gyre.transport.section import open_transport


async def main(config: SglangEngineConfig, context: WorkerContext) -> None:
    """Serves `Engine` at `context.address` until cancelled; raises PeerLost when the server ends."""
    private = Path(tempfile.mkdtemp(prefix="gyre-sglang-"))
    try:
        transport = open_transport(config.transport, config.transport_root, context.name)
        # In shared memory, because the transport may put snapshots there.
        views = Path(config.transport_root) / f"{context.name}-models"
        models = ModelDirs(config.model_dir, views, transport)
        async with serving(config, models.serving(), private) as child:
            client = SglangClient(child.url, child.secret, config.control_timeout_s)
            engine = SglangEngine(client, models, config.max_context, config.control_timeout_s, config.tell_routing)
            if config.weights is not None:
                await engine.update_weights(config.weights)
            server = await serve(engine, Engine, context.address, context.secret)
            context.ready()
            try:
                raise await child.ended()
            finally:
                await server.stop()
                await client.close()
    finally:
        await asyncio.to_thread(shutil.rmtree, private)
