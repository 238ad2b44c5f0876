"""The SGLang adapter keeps the engine contract over SGLang's wire format."""

import pytest
import pytest_asyncio
from contract import CONTEXT, EngineContract, Rig, ask, prompt, request, reset, tiny_config
from sglang_stub import SglangStub, serving

from gyre.core.errors import GyreError, NotReady, PeerLost
from gyre.engines.base import PauseMode
from gyre.engines.local.config import LocalEngineConfig
from gyre.engines.sglang.config import SglangConfig
from gyre.engines.sglang.engine import SglangEngine
from gyre.engines.sglang.wire import ChunkReader
from gyre.transport.shm import ShmTransport

PAGE = 8


@pytest.mark.asyncio(loop_scope="class")
class TestSglang(EngineContract):
    @pytest_asyncio.fixture(loop_scope="class", scope="class")
    async def started(self, tmp_path_factory):
        model_dir, root, exchange = (str(tmp_path_factory.mktemp(name)) for name in ("model", "server", "exchange"))
        tiny_config().save_pretrained(model_dir)
        local = LocalEngineConfig(
            model_dir=model_dir,
            transport_root=root,
            kv_blocks=512,
            page_size=PAGE,
            max_batch_tokens=128,
            max_context=CONTEXT,
        )
        stub = SglangStub(local, ShmTransport(root))
        await stub.engine.start()
        transport = ShmTransport(str(tmp_path_factory.mktemp("weights")))
        async with serving(stub) as url:
            config = SglangConfig(base_url=url, model_dir=model_dir, exchange_dir=exchange, max_context=CONTEXT)
            engine = SglangEngine(config, transport)
            with pytest.raises(NotReady, match="no weights"):
                await ask(engine, request("early", prompt(4)))
            yield Rig(engine, transport, grain=PAGE, exact_counters=False)
            await engine.close()
        await stub.engine.close()

    @pytest_asyncio.fixture(loop_scope="class")
    async def rig(self, started):
        await reset(started)
        return started


async def test_a_server_that_is_gone_is_lost(tmp_path):
    config = SglangConfig(
        base_url="http://127.0.0.1:9", model_dir=str(tmp_path), exchange_dir=str(tmp_path), max_context=10
    )
    engine = SglangEngine(config, ShmTransport(str(tmp_path)))
    with pytest.raises(PeerLost, match="pause_generation"):
        await engine.pause(PauseMode.IN_PLACE)
    await engine.close()


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ('{"error": {"message": "out of memory"}}', "out of memory"),
        ('{"meta_info": {"output_token_logprobs": [[-1.0, 5, null]], "weight_versions": []}}', "weight versions"),
        ('{"meta_info": {"finish_reason": {"type": "melted"}}}', "melted"),
    ],
)
def test_broken_events_are_refused(event, reason):
    with pytest.raises(GyreError, match=reason):
        ChunkReader().read(event)
