"""Starts every process of a run through a `Launcher`, watches that they live, and starts workers anew.

Proxy workers, a runner, and per cell an engine and a trainer, which has a process per rank; pool engines have negative
indices and no trainer. An engine whose weights are broadcast has a weight sender as its second process. A replaced
worker has a new name (`engine-1.2` is the second replacement of engine-1), so its sockets and logs are its own.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from gyre.control.base import ProcessFailure, WorkerId, WorkerLost
from gyre.control.live.config import RunConfig
from gyre.control.live.launching import SENDERS, bundle_of
from gyre.control.task_supervisor import together
from gyre.core.errors import PeerLost
from gyre.engines.base import Engine
from gyre.launch.base import HERE, Launcher, Process, ProcessSpec, encode_config
from gyre.proxy.base import EngineRoute, ProxyControl
from gyre.proxy.proxies import ProxyWorkers
from gyre.rpc import Connection, connect
from gyre.runner.base import Runner
from gyre.store import RunDir
from gyre.training.base import Trainer

T = TypeVar("T")

TRAINER_ENTRY = "gyre.training.worker:main"
SENDER_ENTRY = "gyre.engines.sglang.sender:main"
START_TIMEOUT_S = 120.0
"""Of every process but engines, whose kind says it."""

# Several numerical processes share the cores of one machine: more than one thread each makes all of them slower.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True, eq=False)
class Started:
    """The processes of one worker, leader first, and the connection to the leader."""

    worker: WorkerId
    processes: list[Process]
    connection: Connection[Any]
    watch: asyncio.Task[None]


class Fleet:
    """The running processes of one run, as typed stubs."""

    proxy: ProxyControl
    runner: Runner

    def __init__(self, launcher: Launcher, config: RunConfig, run_dir: RunDir, store: str) -> None:
        self._launcher = launcher
        self._config = config
        self._run_dir = run_dir
        self._store = store
        self._workers: dict[WorkerId, Started] = {}
        self._incarnations: Counter[WorkerId] = Counter()
        self._essential: dict[Process, Connection[Any]] = {}
        self._silent: dict[str, str] = {}
        """Names of processes that were ended because they hung, and how that was seen."""
        self._connections: list[Connection[Any]] = []
        self.failures: asyncio.Queue[ProcessFailure] = asyncio.Queue()
        """Recovery whose processes ended by themselves, or that someone else gave up."""

    async def start(self) -> None:
        """Returns when all are ready. Raises GyreError naming the first one that is not."""
        await together(self.start_essentials(), self.start_cells())

    async def start_essentials(self) -> None:
        """Proxy workers and the runner, which the run cannot do without."""
        runner_config = self._config.runner_config(self._run_dir)

        async def start_proxies() -> None:
            workers = range(self._config.rollout.proxy_workers)
            self.proxy = ProxyWorkers(await together(*(self._start_proxy(f"proxy-{worker}") for worker in workers)))

        async def start_runner() -> None:
            self.runner = await self._start_essential("runner", "gyre.runner.worker:main", runner_config, Runner)

        await together(start_proxies(), start_runner())

    async def start_cells(self) -> None:
        """All engines and trainers. Cells that never serve (policy async) have no engine."""
        scheduler = self._config.scheduler
        cells = range(scheduler.cells)
        serving = scheduler.pool if scheduler.mode == "async" else [*cells, *scheduler.pool]
        engines = [WorkerId("engine", cell) for cell in serving]
        trainers = [WorkerId("trainer", cell) for cell in cells]
        await together(*(self.start_worker(worker) for worker in engines + trainers))

    def worker(self, worker: WorkerId) -> Started:
        """Raises WorkerLost when it has no processes now."""
        if worker not in self._workers:
            raise WorkerLost(worker, "not running")
        return self._workers[worker]

    def engines(self) -> list[Started]:
        return [started for worker, started in self._workers.items() if worker.part == "engine"]

    def transport_root(self, cell: int) -> str:
        """Directory under which the processes of a cell publish weights and KV."""
        return str(self._launcher.scratch(bundle_of(cell)) / "weights")

    def route(self, cell: int) -> EngineRoute | None:
        """Where the engine of a cell is reached; None while it has no process."""
        started = self._workers.get(WorkerId("engine", cell))
        if started is None:
            return None
        scheduler = self._config.scheduler
        capacity = scheduler.cell_capacity if cell >= 0 else scheduler.pool_capacity // scheduler.pool_engines
        return EngineRoute(cell=cell, address=started.connection.address, capacity=capacity)

    async def start_worker(self, worker: WorkerId) -> None:
        """Raises GyreError when one of its processes is not ready in time."""
        incarnation = self._incarnations[worker]
        self._incarnations[worker] += 1
        name = f"{worker}.{incarnation}" if incarnation else str(worker)
        protocol: type[Any]
        if worker.part == "engine":
            protocol, processes = Engine, await self._start_engine(worker.cell, name, incarnation)
        else:
            protocol, processes = Trainer, await self._start_trainer(worker.cell, name, incarnation)
        connection = connect(protocol, processes[0].address, self._launcher.secret)
        watch = asyncio.ensure_future(self._watch(worker, processes))
        self._workers[worker] = Started(worker, processes, connection, watch)

    async def _start_engine(self, cell: int, name: str, incarnation: int) -> list[Process]:
        section, bundle, root = self._config.engine, bundle_of(cell), self.transport_root(cell)
        config = self._config.engine_config(cell, root, incarnation)
        devices, start_timeout_s = range(section.gpus), section.start_timeout_s
        sender_config = section.sender_config(root, self._config.transport)
        if sender_config is None:
            return [await self._launch(name, section.entry, config, start_timeout_s, bundle, devices)]
        at, gpus = (SENDERS, [0]) if section.sender_gpu else (bundle, [])
        sender = await self._launch(f"{name}-sender", SENDER_ENTRY, sender_config, START_TIMEOUT_S, at, gpus)
        try:
            config = msgspec.structs.replace(config, sender=sender.address)
            return [await self._launch(name, section.entry, config, start_timeout_s, bundle, devices), sender]
        except BaseException:
            await sender.stop(grace_s=0.0)
            raise

    async def _start_trainer(self, cell: int, name: str, incarnation: int) -> list[Process]:
        root, ranks = self.transport_root(cell), range(self._config.trainer.parallel.ranks)
        started: dict[int, Process] = {}

        async def start(rank: int) -> None:
            config = self._config.trainer_config(cell, root, self._store, rank, incarnation)
            name_of_rank = f"{name}-rank{rank}" if rank else name
            started[rank] = await self._launch(
                name_of_rank, TRAINER_ENTRY, config, START_TIMEOUT_S, bundle_of(cell), [rank]
            )

        try:
            await together(*(start(rank) for rank in ranks))
        except BaseException:
            # The next attempt needs their devices.
            await asyncio.gather(*(process.stop(grace_s=0.0) for process in started.values()))
            raise
        return [started[rank] for rank in ranks]

    async def kill(self, started: Started) -> None:
        """Ends the processes of a worker, at once; calls on them fail."""
        started.watch.cancel()
        if self._workers.get(started.worker) is started:
            del self._workers[started.worker]
            # Closed at the end of the run: a call on a closed connection is no lost peer, but misuse.
            self._connections.append(started.connection)
        await asyncio.gather(*(process.stop(grace_s=0.0) for process in started.processes))

    async def essential_end(self) -> tuple[str, str]:
        """Returns when a proxy worker or the runner has ended, by itself or by `end_silent`: its name, and how in one
        sentence."""
        return await self._first_end(list(self._essential))

    async def end_silent(self, seconds: float) -> None:
        """Ends every proxy worker and runner that does not answer within `seconds`; `essential_end` tells."""
        answers = await asyncio.gather(*(_answers(connection, seconds) for connection in self._essential.values()))
        silent = [process for process, answered in zip(self._essential, answers, strict=True) if not answered]
        for process in silent:
            self._silent[process.spec.name] = f"did not answer within {seconds:g} s"
        await asyncio.gather(*(process.stop(grace_s=0.0) for process in silent))

    async def close(self) -> None:
        for started in self._workers.values():
            started.watch.cancel()
        connections = [*self._connections, *(started.connection for started in self._workers.values())]
        await asyncio.gather(*(connection.close() for connection in connections))

    async def _watch(self, worker: WorkerId, processes: list[Process]) -> None:
        _, detail = await self._first_end(processes)
        self.failures.put_nowait(ProcessFailure(worker=worker, detail=detail))

    async def _first_end(self, processes: list[Process]) -> tuple[str, str]:
        waits = {asyncio.ensure_future(process.wait()): process for process in processes}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        ended = done.pop()
        process = waits[ended]
        name = process.spec.name
        how = self._silent.get(name, f"ended ({ended.result()})")
        return name, f"process {name} {how}; see {process.log}"

    async def _start_proxy(self, name: str) -> ProxyControl:
        # The same for a worker that takes over: sandboxes see the directory of their socket.
        config = self._config.proxy_config(self._run_dir, str(self._launcher.scratch(HERE) / "sessions"))
        return await self._start_essential(name, "gyre.proxy.worker:main", config, ProxyControl)

    async def _start_essential(self, name: str, entry: str, config: msgspec.Struct, protocol: type[T]) -> T:
        process = await self._launch(name, entry, config, START_TIMEOUT_S)
        connection = connect(protocol, process.address, self._launcher.secret)
        self._essential[process] = connection
        self._connections.append(connection)
        return connection.stub

    async def _launch(
        self,
        name: str,
        entry: str,
        config: msgspec.Struct,
        start_timeout_s: float,
        bundle: str = HERE,
        devices: Sequence[int] = (),
    ) -> Process:
        return await self._launcher.start(
            ProcessSpec(
                name=name,
                entry=entry,
                config=encode_config(config),
                bundle=bundle,
                devices=list(devices),
                env=ONE_THREAD,
                start_timeout_s=start_timeout_s,
            )
        )


async def _answers(connection: Connection[Any], seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await connection.ping()
    except (PeerLost, TimeoutError):
        return False
    return True
