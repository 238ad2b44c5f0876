"""A real worker process that can be killed and taken over; engines are scripted in the test's process."""

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from proxy_fakes import ScriptedEngine

from gyre import rpc
from gyre.core.policy import PolicySection, RolloutSection
from gyre.core.records import CallRecord, SessionAccess
from gyre.engines.base import Engine
from gyre.launch import LocalLauncher, ProcessSpec
from gyre.launch.base import HERE, Process, encode_config
from gyre.proxy.base import EngineRoute, ProxyControl, SessionSpec
from gyre.proxy.config import ProxyConfig, ProxySection
from gyre.store import RunDir

MAX_CONTEXT = 2**20
MAX_NEW = 4000


class Killable:
    """The proxy worker of a run, whichever process it is just now."""

    def __init__(self, launcher: LocalLauncher, run: RunDir, config: ProxyConfig, route: EngineRoute) -> None:
        self._launcher = launcher
        self._run = run
        self._config = config
        self._route = route
        self._process: Process | None = None
        self._connection: rpc.Connection[ProxyControl] | None = None
        self.starts = 0

    @property
    def control(self) -> ProxyControl:
        assert self._connection is not None
        return self._connection.stub

    async def start(self) -> None:
        spec = ProcessSpec(
            name=f"proxy.{self.starts}", entry="gyre.proxy.worker:main", config=encode_config(self._config)
        )
        self.starts += 1
        self._process = await self._launcher.start(spec)
        self._connection = rpc.connect(ProxyControl, self._process.address, self._launcher.secret)

    async def open(self, execution_id: str, harness: str) -> SessionAccess:
        access = await self.control.open_session(SessionSpec(execution_id=execution_id, harness=harness))
        await self.control.set_routes([self._route])
        return access

    async def kill(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await self.disconnect()

    async def disconnect(self) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    def records(self, execution_id: str) -> list[CallRecord]:
        with self._run.open_store(read_only=True) as store:
            return store.records(execution_id)


@contextlib.asynccontextmanager
async def killable_worker(tokenizer: Any, directory: Path, engine: ScriptedEngine) -> AsyncIterator[Killable]:
    run = RunDir.create(directory / "run", "")
    tokenizer_dir = directory / "tokenizer"
    tokenizer.save_pretrained(tokenizer_dir)
    async with LocalLauncher(run.logs) as launcher:
        # Sandboxes must be able to enter it; a launcher's own directory is its user's.
        scratch = launcher.scratch(HERE)
        config = ProxyConfig(
            run_dir=str(run.root),
            policy=PolicySection(model=tokenizer_dir, family="qwen3"),
            rollout=RolloutSection(max_context=MAX_CONTEXT, max_new_tokens=MAX_NEW),
            proxy=ProxySection(keepalive_s=1.0),
            sockets=str(scratch / "http"),
            sessions=str(run.root / "sessions" / "proxy.sqlite"),
        )
        server = await rpc.serve(engine, Engine, f"unix:{scratch}/engine", launcher.secret)
        worker = Killable(launcher, run, config, EngineRoute(cell=0, address=server.address, capacity=8))
        try:
            await worker.start()
            yield worker
        finally:
            await worker.disconnect()
            await server.stop()
