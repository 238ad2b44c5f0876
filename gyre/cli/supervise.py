"""`gyre train` on one machine becomes the process supervisor: the parent of the controller and of all its workers.

A controller that is killed costs no execution: its workers go on, a new one takes them over and goes on from the newest
checkpoint. The supervisor knows nothing of the run; when it is killed, the kernel ends all its children.
"""

import asyncio
import os
import signal
import sys
import time

import msgspec

from gyre.cli.controller import INTERRUPTED, ControllerOrder
from gyre.control.live.config import RunConfig
from gyre.control.live.fleet.launching import devices_here
from gyre.control.setbacks import Setbacks
from gyre.core.errors import GyreError
from gyre.core.events import ExecutionClosed, StepDone
from gyre.core.running_time import RunningTimeLoop
from gyre.launch import LocalLauncher
from gyre.launch.base import HERE, encode_config
from gyre.launch.supervisor import LocalSupervisor, ProcessSupervisor
from gyre.rpc import serve
from gyre.store import RunDir

SOCKET = "supervisor.sock"


def supervise(config: RunConfig, run_dir: RunDir) -> int:
    """Returns the exit code of the controller that ended by itself. Raises GyreError when new ones have no prospect."""
    with asyncio.Runner(loop_factory=RunningTimeLoop) as runner:
        return runner.run(_supervise(config, run_dir))


async def _supervise(config: RunConfig, run_dir: RunDir) -> int:
    setbacks = Setbacks(msgspec.structs.replace(config.recovery, futile_s=config.recovery.detached_s))
    async with LocalLauncher(run_dir.logs, devices=devices_here(config)) as launcher:
        address = f"unix:{launcher.scratch(HERE)}/{SOCKET}"
        server = await serve(LocalSupervisor(launcher), ProcessSupervisor, address, launcher.secret)
        order = ControllerOrder(
            run_dir=str(run_dir.root),
            config=encode_config(config),
            supervisor=address,
            secret=launcher.secret,
            host=launcher.host,
            scratch=str(launcher.scratch(HERE)),
        )
        try:
            while True:
                code, asked = await _control(order)
                if code >= 0:
                    return code
                if asked:
                    return INTERRUPTED
                detail = f"the controller was killed by signal {-code}"
                print(f"gyre: {detail}; its workers go on, and a new one takes them over", file=sys.stderr, flush=True)
                await asyncio.sleep(setbacks.note("the controller", detail, time.monotonic(), _progress(run_dir)))
        finally:
            await server.stop()


async def _control(order: ControllerOrder) -> tuple[int, bool]:
    """Runs one controller to its end: its exit code, and whether it was asked to end. Signals that ask for the end
    reach this process alone, from a terminal as from `kill`, and are handed on: the controller has a process group of
    its own, so that it hears of each once."""
    asked = False
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gyre.cli.controller", stdin=asyncio.subprocess.PIPE, process_group=0
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(order) + b"\n")
    loop = asyncio.get_running_loop()

    def ask(number: int) -> None:
        nonlocal asked
        asked = True
        if process.returncode is None:
            os.kill(process.pid, number)

    # A signal that whoever started the run has ignored stays so (nohup), but for Ctrl-C, which shells let background
    # jobs ignore.
    signals = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    for number in (*signals, signal.SIGINT):
        loop.add_signal_handler(number, ask, number)
    try:
        return await process.wait(), asked
    finally:
        for number in (*signals, signal.SIGINT):
            loop.remove_signal_handler(number)


def _progress(run_dir: RunDir) -> int:
    """Grows when the run gets on."""
    try:
        with run_dir.open_store(read_only=True) as store:
            return sum(isinstance(event, StepDone | ExecutionClosed) for event in store.events())
    except GyreError:
        return 0
