"""The runner as a process: its RPC, and that no sandbox survives it however it ends (T34)."""

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from tiny_tasks import WINDOW, TaskWriter, make_spec

from gyre.core.records import CallFacts, Validity
from gyre.launch import LocalLauncher, ProcessSpec
from gyre.launch.base import encode_config
from gyre.launch.local import LocalProcess
from gyre.rpc import connect
from gyre.runner.base import Runner
from gyre.runner.config import RunnerConfig
from gyre.store import RunStore


class Worker:
    def __init__(self, process: LocalProcess, runner: Runner, run_dir: Path, socket: Path) -> None:
        self.process = process
        self.runner = runner
        self.run_dir = run_dir
        self.socket = socket


@pytest.fixture
async def worker(tmp_path: Path, shell_root: Path, proxy_socket: Path) -> AsyncIterator[Worker]:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    RunStore(run_dir / "gyre.sqlite").close()
    config = RunnerConfig(run_dir=str(run_dir), window=WINDOW, harness_root=str(shell_root))
    spec = ProcessSpec(
        name="runner",
        entry="shell_worker:main",
        config=encode_config(config),
        env={"PYTHONPATH": str(Path(__file__).parent), "TEST_PROFILES": str(tmp_path / "profiles")},
    )
    async with LocalLauncher(tmp_path) as launcher:
        process = await launcher.start(spec)
        connection = connect(Runner, process.address, launcher.secret)
        yield Worker(process, connection.stub, run_dir, proxy_socket)
        await connection.close()


async def started_daemons(worker: Worker, write_task: TaskWriter) -> list[psutil.Process]:
    """Starts an execution whose harness leaves a daemon and stays; returns both as the host sees them."""
    marker = uuid.uuid4().hex
    stay = "bash -c 'echo > $0; sleep 99; true'"
    # Made outside: each is a place to wait for one of the two to have started.
    task = write_task(f"setsid -f {stay} daemon {marker}; {stay} main {marker}")
    for name in ("daemon", "main"):
        os.mkfifo(task / "environment/workspace" / name)
    await worker.runner.start(make_spec("e-0", task, socket=worker.socket))
    app = worker.run_dir / "workspaces/e-0/app"
    while not (app / "main").exists():  # noqa: ASYNC110 — a FIFO cannot be waited for before it exists
        await asyncio.sleep(0.01)
    for name in ("daemon", "main"):
        await asyncio.to_thread((app / name).read_text)
    found = [process for process in psutil.process_iter(["cmdline"]) if marker in (process.info["cmdline"] or [])]
    assert len(found) >= 2
    return found


async def test_an_execution_over_rpc(worker: Worker, write_task: TaskWriter) -> None:
    await worker.runner.start(make_spec("e-0", write_task("echo x > out")))
    await worker.runner.wait_closed("e-0")
    report = await worker.runner.wait("e-0", CallFacts())
    assert (report.outcome.validity, report.outcome.reward) == (Validity.VALID, 1.0)
    assert 0 < report.boot_s < 20
    assert report.outcome.grading_s > 0


async def test_t34_cancel_over_rpc_leaves_no_process(worker: Worker, write_task: TaskWriter) -> None:
    processes = await started_daemons(worker, write_task)
    await worker.runner.cancel("e-0")
    assert not any(process.is_running() for process in processes)
    assert (await worker.runner.wait("e-0", CallFacts())).outcome.cause == "cancelled"


async def test_t34_sigterm_ends_every_sandbox_in_order(worker: Worker, write_task: TaskWriter) -> None:
    processes = await started_daemons(worker, write_task)
    await worker.process.stop(grace_s=20.0)
    assert await worker.process.wait() == "exit 0"
    assert not any(process.is_running() for process in processes)


async def test_t34_sigkill_ends_every_sandbox(worker: Worker, write_task: TaskWriter) -> None:
    processes = await started_daemons(worker, write_task)
    os.kill(worker.process.pid, signal.SIGKILL)
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=10)
    assert alive == []
