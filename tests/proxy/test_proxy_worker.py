"""The worker as a real process: launched, controlled by RPC, serving harnesses on its unix socket."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from proxy_fakes import Script, ScriptedEngine, logprob

from gyre import rpc
from gyre.core.errors import ConfigError, GyreError
from gyre.core.policy import PolicySection, RolloutSection
from gyre.engines.base import Engine
from gyre.launch import LocalLauncher, ProcessSpec
from gyre.launch.base import HERE, encode_config
from gyre.proxy.base import EngineRoute, ProxyControl, SessionSpec
from gyre.proxy.config import ProxyConfig
from gyre.proxy.http.server import listeners
from gyre.store import RunDir
from gyre.trajectory.tree import TrajectoryTree

BODY = {"model": "m", "max_tokens": 500, "messages": [{"role": "user", "content": "go"}]}


def config_of(run: Path, **fields: Any) -> ProxyConfig:
    defaults: dict[str, Any] = {
        "run_dir": str(run), "policy": PolicySection(model=Path("nowhere"), family="qwen3"), "sockets": "",
        "rollout": RolloutSection(temperature=0.7, max_context=4000, max_new_tokens=1000),
    }  # fmt: skip
    return ProxyConfig(**{**defaults, **fields})


@pytest.mark.live
async def test_worker_serves_records_and_ends_in_order(proxy_tokenizer: Any, tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", "")
    tokenizer_dir = tmp_path / "tokenizer"
    proxy_tokenizer.save_pretrained(tokenizer_dir)
    engine = ScriptedEngine(Script(proxy_tokenizer, lambda prompt: "hello there"), version=7)
    async with LocalLauncher(run.logs) as launcher:
        sockets = str(launcher.scratch(HERE) / "http")
        config = config_of(run.root, policy=PolicySection(model=tokenizer_dir, family="qwen3"), sockets=sockets)
        encoded = encode_config(config)
        process = await launcher.start(ProcessSpec(name="proxy", entry="gyre.proxy.worker:main", config=encoded))
        server = await rpc.serve(engine, Engine, f"unix:{launcher.scratch(HERE)}/engine-test", launcher.secret)
        connection = rpc.connect(ProxyControl, process.address, launcher.secret)
        proxy = connection.stub
        access = await proxy.open_session(SessionSpec(execution_id="g0-0", harness="claude_code"))
        with pytest.raises(ConfigError, match="unknown"):
            await proxy.open_session(SessionSpec(execution_id="g0-1", harness="no-such-harness"))
        await proxy.set_routes([EngineRoute(cell=0, address=server.address, capacity=2)])

        transport = httpx.AsyncHTTPTransport(uds=access.socket)
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy", timeout=20) as client:
            url, headers = access.path + "/v1/messages", {"x-api-key": access.api_key}
            answer = await client.post(url, json=BODY, headers=headers)
            assert answer.json()["content"] == [{"type": "text", "text": "hello there"}]

            reached = asyncio.Event()

            async def hold(done: int) -> None:
                reached.set()
                await asyncio.Event().wait()

            engine.step = hold
            second = asyncio.create_task(client.post(url, json={**BODY, "max_tokens": 9}, headers=headers))
            await reached.wait()
            assert (await proxy.stats()).calls_by_cell == {0: 1}
            summary = await proxy.close_session("g0-0")
            assert (await second).status_code == 410
            assert (await client.post(url, json=BODY, headers=headers)).status_code == 410
        assert list(Path(sockets).iterdir()) == [], "an ended execution has no socket"
        assert (summary.calls, summary.orphans) == (1, 0), "no token of the second call was sampled"
        with pytest.raises(GyreError, match="no session"):
            await proxy.close_session("g9-9")

        request = engine.requests[0]
        assert (request.sampling.temperature, request.max_new_tokens) == (0.7, 500)
        stop = proxy_tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert stop in request.sampling.stop_token_ids
        with run.open_store(read_only=True) as store:
            (record,) = store.records("g0-0")
        ids = [*proxy_tokenizer.encode("hello there"), stop]
        assert record.output_ids == ids
        assert record.output_logprobs == [logprob(token, len(record.delta_ids) + i) for i, token in enumerate(ids)]
        assert record.output_versions == [7] * len(ids)
        assert TrajectoryTree.from_records([record]).path_ids(record.call_id) == request.input_ids + ids
        await connection.close()
    assert await process.wait() == "exit 0"
    await server.stop()


def test_bad_places_to_listen_are_named(tmp_path: Path) -> None:
    occupied = socket.create_server(("127.0.0.1", 0))
    taken = occupied.getsockname()[1]
    for fields, words in (
        ({"sockets": str(tmp_path / "missing" / "x")}, "cannot listen on"),
        ({"sockets": str(tmp_path / ("x" * 120))}, "more than 79 bytes"),
        ({"rollout": RolloutSection(max_context=4000, max_new_tokens=1000, port=taken)}, "cannot listen on"),
        ({}, "a directory for sockets, or a port"),
    ):
        with pytest.raises(ConfigError, match=words):
            listeners(config_of(tmp_path, **fields))
    occupied.close()
