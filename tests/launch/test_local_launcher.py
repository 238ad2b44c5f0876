import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import psutil
import pytest
from workers import Echo, EchoConfig

from gyre.core.errors import GyreError, NotReady, PeerLost
from gyre.launch import LocalLauncher, ProcessSpec
from gyre.rpc import connect

TESTS = str(Path(__file__).parent)


def spec(name: str = "echo", timeout: float = 30.0, **config: object) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        entry="workers:main",
        config=msgspec.Raw(msgspec.json.encode(EchoConfig(greeting="hello", **config))),  # type: ignore[arg-type]
        env={"PYTHONPATH": TESTS},
        start_timeout_s=timeout,
    )


async def test_worker_serves_streams_and_returns_typed_errors(tmp_path: Path) -> None:
    async with LocalLauncher(tmp_path) as launcher:
        process = await launcher.start(spec())
        connection = connect(Echo, process.address, launcher.secret)
        assert await connection.stub.greet("world", 2) == "hello world hello world"
        assert [i async for i in connection.stub.count(5)] == [0, 1, 2, 3, 4]
        with pytest.raises(NotReady, match="no weights yet"):
            await connection.stub.refuse()
        await connection.close()
    assert await process.wait() == "exit 0"


async def test_wrong_secret_is_refused(tmp_path: Path) -> None:
    async with LocalLauncher(tmp_path) as launcher:
        process = await launcher.start(spec())
        connection = connect(Echo, process.address, "guess")
        with pytest.raises(GyreError, match="wrong secret"):
            await connection.stub.greet("x", 1)
        await connection.close()


async def test_dead_worker_is_peer_lost_and_its_end_is_told(tmp_path: Path) -> None:
    async with LocalLauncher(tmp_path) as launcher:
        process = await launcher.start(spec())
        os.kill(process.pid, signal.SIGKILL)
        assert await process.wait() == "killed by signal 9"
        connection = connect(Echo, process.address, launcher.secret)
        with pytest.raises(PeerLost):
            await connection.stub.greet("x", 1)
        await connection.close()


async def test_worker_that_fails_to_start_is_one_sentence_with_its_log(tmp_path: Path) -> None:
    async with LocalLauncher(tmp_path) as launcher:
        with pytest.raises(GyreError, match=r"process echo ended while starting(.|\n)*broken on purpose"):
            await launcher.start(spec(broken=True))


async def test_worker_that_never_gets_ready_is_stopped(tmp_path: Path) -> None:
    async with LocalLauncher(tmp_path) as launcher:
        with pytest.raises(GyreError, match="not ready in time"):
            await launcher.start(spec(timeout=1.0, deaf=True))
    assert not [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


def test_killed_supervisor_leaves_no_worker(tmp_path: Path) -> None:
    program = textwrap.dedent(f"""
        import asyncio, sys
        from pathlib import Path
        sys.path.insert(0, {TESTS!r})
        from test_local_launcher import spec
        from gyre.launch import LocalLauncher
        async def main():
            process = await LocalLauncher(Path({str(tmp_path)!r})).start(spec())
            print(process.pid, flush=True)
            await asyncio.Event().wait()
        asyncio.run(main())
    """)
    supervisor = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    worker = psutil.Process(int(supervisor.stdout.readline()))
    supervisor.kill()
    supervisor.wait()
    worker.wait(10)
    assert not worker.is_running()
