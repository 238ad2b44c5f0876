"""Several workers behind one control: who serves an execution, what each may place, and real processes."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy_fakes import Script, ScriptedEngine

from gyre import rpc
from gyre.core.policy import PolicySection, RolloutSection
from gyre.core.records import SessionAccess
from gyre.engines.base import Engine
from gyre.launch import LocalLauncher, ProcessSpec
from gyre.launch.base import HERE, encode_config
from gyre.proxy.base import DrainReport, EngineRoute, ProxyControl, ProxyStats, SessionSpec, SessionSummary
from gyre.proxy.config import ProxyConfig
from gyre.proxy.proxies import ProxyWorkers, share_of, worker_of
from gyre.store import RunDir

WORKERS = 2
EXECUTIONS = [f"g{group}-{index}" for group in range(4) for index in range(4)]
BODY = {"model": "m", "max_tokens": 500, "messages": [{"role": "user", "content": "go"}]}


class WorkerThatRecords:
    def __init__(self, number: int) -> None:
        self.number = number
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.routes: list[EngineRoute] = []

    async def open_session(self, spec: SessionSpec) -> SessionAccess:
        self.opened.append(spec.execution_id)
        return SessionAccess(path="/x", api_key="key", socket=f"{self.number}.sock")

    async def close_session(self, execution_id: str) -> SessionSummary:
        self.closed.append(execution_id)
        return SessionSummary(
            execution_id=execution_id, calls=self.number, orphans=0, retries_attached=0, retries_replayed=0, drift={}
        )

    async def set_routes(self, routes: list[EngineRoute]) -> None:
        self.routes = routes

    async def drain(self, cell: int) -> DrainReport:
        return DrainReport(calls_in_flight=cell, rerouted=self.number, with_kv=1, failed=0)

    async def stats(self) -> ProxyStats:
        return ProxyStats(
            sessions=1, calls_running=2, calls_done=3, calls_by_cell={0: 1, self.number: 2}, held=4,
            prompt_mismatches=5, harness_errors_from_transitions=6, retries=7,
        )  # fmt: skip


async def test_an_execution_stays_with_its_worker_and_engines_concern_all() -> None:
    workers = [WorkerThatRecords(number) for number in (1, 2, 3)]
    proxies = ProxyWorkers(workers)
    for execution_id in EXECUTIONS:
        worker = workers[worker_of(execution_id, 3)]
        access = await proxies.open_session(SessionSpec(execution_id=execution_id, harness="h"))
        assert access.socket == f"{worker.number}.sock"
        assert (await proxies.close_session(execution_id)).calls == worker.number
    assert all(worker.opened == worker.closed != [] for worker in workers)
    assert sorted(name for worker in workers for name in worker.opened) == sorted(EXECUTIONS)

    await proxies.set_routes([EngineRoute(cell=cell, address=f"a{cell}", capacity=4) for cell in (0, 1, 2)])
    assert [[route.cell for route in worker.routes] for worker in workers] == [[0, 1, 2]] * 3
    assert await proxies.drain(5) == DrainReport(calls_in_flight=15, rerouted=6, with_kv=3, failed=0)
    assert await proxies.stats() == ProxyStats(
        sessions=3, calls_running=6, calls_done=9, calls_by_cell={0: 3, 1: 2, 2: 2, 3: 2}, held=12,
        prompt_mismatches=15, harness_errors_from_transitions=18, retries=21,
    )  # fmt: skip


@given(capacity=st.integers(0, 1000), cell=st.integers(-8, 64), workers=st.integers(1, 9))
def test_shares_of_an_engine_sum_to_its_capacity(capacity: int, cell: int, workers: int) -> None:
    route = EngineRoute(cell=cell, address="a", capacity=capacity)
    shares = [share_of(route, worker, workers).capacity for worker in range(workers)]
    assert sum(shares) == capacity
    assert max(shares) - min(shares) <= 1


def test_the_remainders_of_several_engines_go_to_different_workers() -> None:
    routes = [EngineRoute(cell=cell, address="a", capacity=3) for cell in range(4)]
    totals = [sum(share_of(route, worker, 2).capacity for route in routes) for worker in range(2)]
    assert totals == [6, 6]


def test_executions_are_spread_evenly() -> None:
    counts = Counter(worker_of(f"g{group}-{index}", 4) for group in range(500) for index in range(8))
    assert all(abs(counts[worker] - 1000) < 100 for worker in range(4))


@pytest.mark.live
async def test_two_worker_processes_serve_one_run(proxy_tokenizer: Any, tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", "")
    tokenizer_dir = tmp_path / "tokenizer"
    proxy_tokenizer.save_pretrained(tokenizer_dir)
    script = Script(proxy_tokenizer, lambda prompt: "a sentence of some length")
    engines = [ScriptedEngine(script, version=3), ScriptedEngine(script, version=3)]
    all_run = asyncio.Event()

    async def hold(done: int) -> None:
        """Every call stops at engine 0 after ten tokens."""
        if done >= 10:
            if len(engines[0].requests) == len(EXECUTIONS):
                all_run.set()
            await asyncio.Event().wait()

    engines[0].step = hold
    async with LocalLauncher(run.logs) as launcher:

        async def start(number: int) -> tuple[str, rpc.Connection[Any]]:
            config = ProxyConfig(
                run_dir=str(run.root), policy=PolicySection(model=tokenizer_dir, family="qwen3"),
                rollout=RolloutSection(max_context=4000, max_new_tokens=1000),
                sockets=str(launcher.scratch(HERE) / f"http-{number}"),
            )  # fmt: skip
            spec = ProcessSpec(name=f"proxy-{number}", entry="gyre.proxy.worker:main", config=encode_config(config))
            process = await launcher.start(spec)
            return config.sockets, rpc.connect(ProxyControl, process.address, launcher.secret)

        sockets, connections = zip(*await asyncio.gather(*(start(number) for number in range(WORKERS))), strict=True)
        proxies = ProxyWorkers([connection.stub for connection in connections])
        servers = [
            await rpc.serve(engine, Engine, f"unix:{launcher.scratch(HERE)}/engine-{cell}", launcher.secret)
            for cell, engine in enumerate(engines)
        ]
        routes = [EngineRoute(cell=cell, address=server.address, capacity=8) for cell, server in enumerate(servers)]
        await proxies.set_routes(routes[:1])

        async def execute(execution_id: str) -> SessionSummary:
            access = await proxies.open_session(SessionSpec(execution_id=execution_id, harness="claude_code"))
            assert access.socket.startswith(sockets[worker_of(execution_id, WORKERS)])
            transport = httpx.AsyncHTTPTransport(uds=access.socket)
            async with httpx.AsyncClient(transport=transport, base_url="http://proxy", timeout=20) as client:
                answer = await client.post(
                    access.path + "/v1/messages", json=BODY, headers={"x-api-key": access.api_key}
                )
            assert answer.json()["content"] == [{"type": "text", "text": "a sentence of some length"}]
            return await proxies.close_session(execution_id)

        executions = [asyncio.create_task(execute(execution_id)) for execution_id in EXECUTIONS]
        async with asyncio.timeout(20):
            await all_run.wait()
        assert (await proxies.stats()).calls_by_cell == {0: len(EXECUTIONS)}

        # The cell leaves: calls of both workers go on at the other engine, from the tokens already produced.
        await proxies.set_routes(routes[1:])
        report = await proxies.drain(0)
        assert (report.calls_in_flight, report.rerouted, report.failed) == (len(EXECUTIONS), len(EXECUTIONS), 0)
        summaries = await asyncio.gather(*executions)
        assert all(summary.calls == 1 for summary in summaries)
        stats = await proxies.stats()
        assert (stats.sessions, stats.calls_done, stats.prompt_mismatches) == (0, len(EXECUTIONS), 0)
        for connection in connections:
            await connection.close()
        for server in servers:
            await server.stop()

    with run.open_store(read_only=True) as store:
        records = [record for execution_id in EXECUTIONS for record in store.records(execution_id)]
    assert [record.execution_id for record in records] == EXECUTIONS
    assert all(record.cells == [0, 1] for record in records)
    assert {worker_of(execution_id, WORKERS) for execution_id in EXECUTIONS} == set(range(WORKERS))
