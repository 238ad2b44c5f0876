"""Weights by broadcast: a real sender process, and servers that take them as SGLang does, each a process that can die,
hang and refuse."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from contract import Rig, ask, prompt, request
from receiving_sglang import digest
from sglang_servers import BUCKET, SenderProcess, save_tiny_model

from gyre.core.errors import ConfigError, NotReady, PeerLost, WeightsUnavailable
from gyre.engines.sglang.broadcast import Broadcast
from gyre.engines.sglang.client import SglangClient
from gyre.engines.sglang.config import SenderConfig
from gyre.engines.sglang.engine import SglangEngine
from gyre.engines.sglang.sender import Sender
from gyre.engines.sglang.weights import ModelDirs
from gyre.launch.local import LocalLauncher
from gyre.transport.shm import ShmTransport
from gyre.transport.state import published_state

pytestmark = pytest.mark.live

SERVER = Path(__file__).with_name("receiving_sglang.py")
LONG_S = 60.0
SHORT_S = 2.0
"""Of steps that a test lets run into their deadline."""


class Server:
    """A process of `receiving_sglang.py`."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, str(SERVER)], stdout=subprocess.PIPE, text=True)
        self._url = ""

    @property
    def url(self) -> str:
        self._url = self._url or self.process.stdout.readline().strip()
        return self._url

    def script(self, **orders) -> dict:
        return httpx.post(f"{self.url}/script", json=orders, trust_env=False).json()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Engines:
    """Starts engines over given servers, each with a sender of its own, and holds the trainer's side of them."""

    model_dir: str
    root: Path
    launcher: LocalLauncher
    closing: contextlib.AsyncExitStack

    def __post_init__(self) -> None:
        self.transport = ShmTransport(str(self.root / "weights"))
        self.models = ModelDirs(self.model_dir, self.root / "models")

    async def start(self, server: Server, ranks: int = 1, timeout_s: float = LONG_S, process: bool = False) -> Rig:
        config = SenderConfig(transport_root=str(self.transport.root), bucket_bytes=BUCKET, step_timeout_s=timeout_s)
        sender = SenderProcess(config, self.launcher, self.closing) if process else Sender(config, self.transport)
        if process:
            await sender.start()
        client = SglangClient(server.url, "secret", control_timeout_s=timeout_s)
        self.closing.push_async_callback(client.aclose)
        publication = Broadcast(client, self.models, sender, ranks, timeout_s)
        rig = Rig(SglangEngine(client, self.models, publication, 512, timeout_s), self.transport, grain=1)
        rig.sender = sender
        return rig


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def started():
    servers: dict[int, Server] = {}
    yield servers
    for server in servers.values():
        server.kill()


@pytest.fixture
def servers(started):
    """The servers of this module by number; one that a test has killed is started anew."""

    def server(number: int = 0, **orders) -> Server:
        if number not in started or started[number].process.poll() is not None:
            started[number] = Server()
        started[number].script(new=True, **orders)
        return started[number]

    return server


@pytest.fixture
async def engines(model_dir, tmp_path):
    async with LocalLauncher(tmp_path) as launcher, contextlib.AsyncExitStack() as closing:
        yield Engines(model_dir, tmp_path, launcher, closing)


def published(rig: Rig, version: int) -> dict[str, list]:
    return {name: digest(tensor) for name, tensor in published_state(rig.models[version]).items()}


async def check(rig: Rig, version: int, *ranks: Server) -> None:
    """The engine has the version, and every rank the bytes that were published, with nothing left open."""
    assert (await rig.engine.status()).version == version
    for rank in ranks:
        state = rank.script()
        assert state["received"] == published(rig, version)
        assert not state["session"]
        assert len(state["groups"]) == 1


@contextlib.asynccontextmanager
async def under_way(rig: Rig, server: Server, version: int):
    """Yields the task of an update in the middle of its broadcast: one bucket was taken, the next one is held back."""
    server.script(hold=1)
    update = asyncio.create_task(rig.engine.update_weights(rig.publish(version)))
    async with asyncio.timeout(30):
        while not (await asyncio.to_thread(server.script))["held"]:
            assert not update.done(), update
            await asyncio.sleep(0.01)
    yield update
    assert (await rig.engine.status()).version == -1
    with pytest.raises(NotReady, match="no weights"):
        await ask(rig.engine, request("a", prompt(4)))


async def test_the_server_has_the_published_bytes(servers, engines):
    server = servers()
    rig = await engines.start(server)
    for version in (1, 2):
        await rig.engine.update_weights(rig.publish(version))
        await check(rig, version, server)
    calls = [call for call in server.script()["calls"] if call[0] not in ("/flush_cache", "/abort_request")]
    paths = [path for path, _ in calls]
    assert paths.count("/init_weights_update_group") == 1
    buckets = [body for path, body in calls if path == "/update_weights_from_distributed"]
    assert len(buckets) > 6
    assert [body["weight_version"] for body in buckets if body["flush_cache"]] == ["1", "2"]
    assert [body["weight_version"] for body in buckets if body["weight_version"]] == ["1", "2"]
    one = ["/begin_weight_update"] + ["/update_weights_from_distributed"] * (len(buckets) // 2) + ["/end_weight_update"]
    assert paths == ["/init_weights_update_group", *one, *one]


async def test_two_ranks_have_the_published_bytes(servers, engines):
    second = servers(1, rank=1)
    first = servers(follower=second.url)
    rig = await engines.start(first, ranks=2)
    for version in (1, 2):
        await rig.engine.update_weights(rig.publish(version))
        await check(rig, version, first, second)


async def test_an_engine_that_hangs_changes_nothing_for_another_one(servers, engines):
    stuck, other = servers(), servers(1)
    first, second = await engines.start(stuck), await engines.start(other)
    stuck.script(hold=2)
    update = asyncio.create_task(first.engine.update_weights(first.publish(1)))
    for version in (1, 2, 3):
        await second.engine.update_weights(second.publish(version))
        await check(second, version, other)
    assert not update.done()
    stuck.script(rank=0)
    await update
    await check(first, 1, stuck)


async def test_weights_of_another_model_do_not_reach_the_server(servers, engines):
    server = servers()
    rig = await engines.start(server)
    await rig.engine.update_weights(rig.publish(1))
    calls = len(server.script()["calls"])
    wrong = published_state(rig.models[1])
    wrong["model.norm.weight"] = wrong["model.norm.weight"][:10]
    gone = rig.publish(7)
    rig.transport.retire({1})
    for ref, reason in ((rig.transport.publish(8, wrong), "does not fit"), (gone, "gone")):
        with pytest.raises(WeightsUnavailable, match=reason):
            await rig.engine.update_weights(ref)
    assert len(server.script()["calls"]) == calls
    await check(rig, 1, server)


@pytest.mark.parametrize(
    "path", ["init_weights_update_group", "begin_weight_update", "update_weights_from_distributed", "end_weight_update"]
)
async def test_a_server_that_refuses_has_no_version_until_an_update_succeeds(path, servers, engines):
    server = servers(refuse=[f"/{path}"])
    rig = await engines.start(server)
    with pytest.raises(WeightsUnavailable, match=rf"version 1 was not loaded.*{path}.*out of luck"):
        await rig.engine.update_weights(rig.publish(1))
    assert (await rig.engine.status()).version == -1
    server.script(rank=0)
    if path == "end_weight_update":
        # The server could not be told to close its session; what begins the next update closes it.
        with pytest.raises(WeightsUnavailable, match="already open"):
            await rig.engine.update_weights(rig.publish(2))
    await rig.engine.update_weights(rig.publish(2))
    await check(rig, 2, server)


async def test_an_update_that_was_called_off_is_cleared_away_by_the_next_one(servers, engines):
    server = servers()
    rig = await engines.start(server)
    await rig.engine.update_weights(rig.publish(1))
    async with under_way(rig, server, 2) as update:
        update.cancel()
        await asyncio.wait([update])
    server.script(rank=0)
    await rig.engine.update_weights(rig.publish(3))
    await check(rig, 3, server)


async def test_a_server_that_dies_in_a_broadcast_is_lost(servers, engines):
    server = servers()
    rig = await engines.start(server, process=True)
    await rig.engine.update_weights(rig.publish(1))
    async with under_way(rig, server, 2) as update:
        server.kill()
        with pytest.raises(PeerLost, match="SGLang"):
            await update


async def test_a_server_that_hangs_in_a_broadcast_is_lost(servers, engines):
    server = servers()
    rig = await engines.start(server, timeout_s=SHORT_S)
    await rig.engine.update_weights(rig.publish(1))
    async with under_way(rig, server, 2) as update:
        server.process.send_signal(signal.SIGSTOP)
        with pytest.raises(PeerLost, match="SGLang"):
            await update
        server.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_sender_that_dies_or_hangs_in_a_broadcast_is_lost_and_a_new_one_serves(number, servers, engines):
    server = servers()
    rig = await engines.start(server, process=True, timeout_s=LONG_S if number == signal.SIGKILL else SHORT_S)
    await rig.engine.update_weights(rig.publish(1))
    async with under_way(rig, server, 2) as update:
        os.kill(rig.sender.process.pid, number)
        server.script(rank=0)
        with pytest.raises(PeerLost):
            await update
    await rig.sender.process.stop(grace_s=0.0)
    await rig.sender.start()
    await rig.engine.update_weights(rig.publish(3))
    await check(rig, 3, server)


async def test_ranks_that_do_not_come_are_an_error_within_the_deadline(tmp_path):
    config = SenderConfig(transport_root=str(tmp_path), step_timeout_s=0.5)
    sender = Sender(config, ShmTransport(config.transport_root))
    await sender.open(1)
    with pytest.raises(WeightsUnavailable, match="did not meet"):
        await sender.join()
    with pytest.raises(NotReady, match="plan, open and join"):
        await sender.send(0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_device_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no CUDA device"):
        Sender(SenderConfig(transport_root=str(tmp_path), device="cuda"), ShmTransport(str(tmp_path)))
