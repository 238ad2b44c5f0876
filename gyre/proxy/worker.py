"""The proxy worker process: HTTP for harnesses, RPC for the controller, engines and the run database behind."""

import asyncio
from functools import cache
from pathlib import Path

from gyre.chat.render import ChatRenderer
from gyre.core.clock import SystemClock
from gyre.engines.base import Engine, Sampling
from gyre.harnesses import load_profile
from gyre.launch.base import WorkerContext
from gyre.launch.serving import serving_rpc
from gyre.proxy.base import ProxyControl
from gyre.proxy.config import ProxyConfig
from gyre.proxy.control import Proxy
from gyre.proxy.http.routes import HttpLimits, SessionRegistry, create_app
from gyre.proxy.http.server import listeners, serve_http
from gyre.proxy.router.router import Router, RouterLimits
from gyre.proxy.session.services import CallBounds, Services, StoreSink
from gyre.proxy.session.tokenizer import load_tokenizer
from gyre.rpc import connect
from gyre.store import RunDir


async def main(config: ProxyConfig, context: WorkerContext) -> None:
    """Serves until cancelled. Raises ConfigError when the tokenizer cannot be read or an address is taken."""
    policy, rollout = config.policy, config.rollout
    renderer = ChatRenderer(load_tokenizer(str(policy.model)), policy.family, thinking=policy.thinking)
    limits = RouterLimits(
        hold_s=config.hold_timeout_s,
        stall_s=config.stall_timeout_s,
        drain_s=config.drain_timeout_s,
        handoff_s=config.handoff_timeout_s,
    )
    router = Router(lambda address: connect(Engine, address, context.secret), limits)
    sink = StoreSink(RunDir.open(Path(config.run_dir)).open_store())
    services = Services(
        renderer=renderer,
        router=router,
        sink=sink,
        clock=SystemClock(),
        sampling=Sampling(temperature=rollout.temperature, stop_token_ids=sorted(renderer.stop_token_ids)),
        bounds=CallBounds(
            max_context=rollout.max_context,
            max_new_tokens=rollout.max_new_tokens,
            running=config.max_calls_per_session,
        ),
        coalesce_s=config.coalesce_s,
        replay_routing=config.replay_routing,
    )
    registry = SessionRegistry()
    proxy = Proxy(services, registry, cache(load_profile), config.socket)
    http_limits = HttpLimits(
        keepalive_s=config.keepalive_s,
        client_timeout_s=config.client_timeout_s,
        max_body_bytes=config.max_body_bytes,
    )
    app = create_app(registry, http_limits)
    try:
        async with serve_http(app, listeners(config)):
            try:
                async with serving_rpc(proxy, ProxyControl, context):
                    await asyncio.Event().wait()
            finally:
                await proxy.close()
    finally:
        await router.close()
        sink.close()
