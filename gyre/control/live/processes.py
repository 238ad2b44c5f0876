"""Starts every process of a run through a `Launcher` and watches that they live.

One proxy worker, one runner, and per cell an engine and a trainer; pool engines have negative indices and no trainer.
"""

import asyncio
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gyre.control.live.config import RunConfig
from gyre.core.errors import GyreError
from gyre.engines.base import Engine
from gyre.launch.base import Launcher, Process, ProcessSpec
from gyre.proxy.base import EngineRoute, ProxyControl
from gyre.rpc import Connection, connect
from gyre.runner.base import Runner
from gyre.store import RunDir
from gyre.training.base import Trainer

T = TypeVar("T")

# Several numerical processes share the cores of one machine: more than one thread each makes all of them slower.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class ProcessEnded(GyreError):
    """A process of the run is gone; the run stops and can be resumed."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class Fleet:
    """The running processes of one run, as typed stubs. `scratch` is a private directory, best in shared memory."""

    proxy: ProxyControl
    runner: Runner
    engines: dict[int, Engine]
    trainers: dict[int, Trainer]
    routes: dict[int, EngineRoute]

    def __init__(self, launcher: Launcher, config: RunConfig, run_dir: RunDir, scratch: Path, store: str) -> None:
        self._launcher = launcher
        self._config = config
        self._run_dir = run_dir
        self.transport_root = str(scratch / "weights")
        self._socket = str(scratch / "http.sock")
        self._store = store
        self._processes: list[Process] = []
        self._connections: list[Connection[Any]] = []
        self.engines, self.trainers, self.routes = {}, {}, {}

    async def start(self) -> None:
        """Returns when all are ready. Raises GyreError naming the first one that is not."""
        config, scheduler = self._config, self._config.scheduler
        cells = range(scheduler.K)
        async with asyncio.TaskGroup() as group:
            proxy_config = config.proxy_config(self._run_dir, self._socket)
            proxy = group.create_task(self._start("proxy", "gyre.proxy.worker:main", proxy_config, ProxyControl))
            runner_config = config.runner_config(self._run_dir, self._socket)
            runner = group.create_task(self._start("runner", "gyre.runner.worker:main", runner_config, Runner))
            engines = {
                cell: group.create_task(
                    self._start(
                        f"engine-{cell}" if cell >= 0 else f"engine-pool{-cell}",
                        "gyre.engines.local.worker:main",
                        config.engine_config(cell, self.transport_root),
                        Engine,
                    )
                )
                for cell in [*cells, *scheduler.pool]
            }
            trainers = {
                cell: group.create_task(
                    self._start(
                        f"trainer-{cell}",
                        "gyre.training.worker:main",
                        config.trainer_config(cell, self.transport_root, self._store),
                        Trainer,
                    )
                )
                for cell in cells
            }
        self.proxy, self.runner = proxy.result().stub, runner.result().stub
        for cell, started in engines.items():
            self.engines[cell] = started.result().stub
            capacity = scheduler.C_e if cell >= 0 else scheduler.C_s // scheduler.pool_engines
            self.routes[cell] = EngineRoute(cell=cell, address=started.result().address, capacity=capacity)
        self.trainers = {cell: started.result().stub for cell, started in trainers.items()}

    async def watch(self) -> None:
        """Never returns; raises ProcessEnded as soon as one process has ended."""
        waits = {asyncio.ensure_future(process.wait()): process for process in self._processes}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        ended = done.pop()
        name = waits[ended].spec.name
        raise ProcessEnded(name, f"process {name} ended ({ended.result()}); see {self._run_dir.logs / name}.log")

    async def close(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self._connections))

    async def _start(self, name: str, entry: str, config: msgspec.Struct, protocol: type[T]) -> Connection[T]:
        spec = ProcessSpec(name=name, entry=entry, config=msgspec.Raw(msgspec.json.encode(config)), env=ONE_THREAD)
        process = await self._launcher.start(spec)
        self._processes.append(process)
        connection = connect(protocol, process.address, self._launcher.secret)
        self._connections.append(connection)
        return connection
