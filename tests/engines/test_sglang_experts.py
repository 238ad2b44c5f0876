"""A real SGLang server tells the experts of a Qwen3-MoE policy as a plain forward chooses them."""

import asyncio

import numpy as np
import pytest
from contract import Answer, ask, prompt, request, until
from moe_models import moe_config, moe_model, plain_experts
from msgspec.structs import replace
from sglang_servers import cpu_config, needs_sglang, publication

from gyre.core.expert_routing import joined
from gyre.engines.base import PauseMode
from gyre.engines.sglang.client import SglangClient
from gyre.engines.sglang.engine import SglangEngine
from gyre.engines.sglang.server import serving
from gyre.engines.sglang.weights import ModelDirs
from gyre.transport import experts
from gyre.transport.shm import ShmTransport
from gyre.transport.state import published_state

pytestmark = [pytest.mark.sglang, needs_sglang]


async def test_T27_a_real_server_tells_the_experts_of_every_position(tmp_path):
    """Of a prompt, of one that its prefix cache serves, and of a call that a pause cut in two segments."""
    model = moe_model(moe_config(), seed=1)
    model.save_pretrained(tmp_path / "model")
    transport = ShmTransport(str(tmp_path / "weights"))
    config = cpu_config(str(tmp_path / "model"), str(transport.root), replay_routing=True)
    models = ModelDirs(config.model_dir, tmp_path / "models")
    async with serving(config, models.serving(), tmp_path) as server:
        client = SglangClient(server.url, server.secret, control_timeout_s=60.0)
        way = publication("snapshot", client, models, transport)
        engine = SglangEngine(client, models, way, config.max_context, 60.0, replay_routing=True)
        ref = transport.publish(1, experts.split(published_state(model)))
        await engine.update_weights(ref)

        def check(ids: list[int], answer: Answer, start: int) -> None:
            told = joined([chunk.routing for chunk in answer.chunks if chunk.routing is not None])
            whole = ids + answer.output_ids
            assert told.positions == len(whole) - 1 - start
            assert (np.sort(told.choices(), -1) == plain_experts(model, whole)[start:-1]).all()

        ids = prompt(60)
        check(ids, await ask(engine, replace(request("a", ids, 12), routing_from=0)), 0)
        served = await ask(engine, replace(request("b", ids, 12), routing_from=20))
        assert served.first.cached_tokens > 40
        check(ids, served, 20)
        cut = Answer()
        task = asyncio.create_task(ask(engine, replace(request("c", ids, 200), routing_from=0), cut))
        await until(lambda: len(cut.output_ids) > 20, task)
        await engine.pause(PauseMode.IN_PLACE)
        assert not task.done()
        await engine.resume()
        check(ids, await task, 0)
        await client.aclose()
