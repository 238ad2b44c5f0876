"""The controller as a child of the process supervisor (`gyre.cli.supervise`), which replaces one that is killed.

`python -m gyre.cli.controller`, the order on standard input.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec

from gyre.cli.progress import Progress
from gyre.control.live.config import RunConfig
from gyre.control.live.run import Run
from gyre.core.errors import ConfigError, GyreError
from gyre.core.running_time import RunningTimeLoop
from gyre.core.system.programs import raise_open_files
from gyre.launch.base import decode_config
from gyre.launch.supervisor import ProcessSupervisor, SupervisedLauncher
from gyre.launch.worker import die_with_parent
from gyre.rpc import connect
from gyre.store import RunDir

INTERRUPTED = 130


class ControllerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor tells a controller."""

    run_dir: str
    config: msgspec.Raw
    """`RunConfig` as JSON."""
    supervisor: str
    """RPC address."""
    secret: str
    host: str
    scratch: str


async def control(config: RunConfig, run_dir: RunDir, launcher: SupervisedLauncher | None) -> bool:
    """Whether the run was interrupted. The first Ctrl-C ends it in order, the second at once; workers are not in the
    terminal's group."""
    with Progress() as progress:
        run = Run(config, run_dir, progress.update, launcher)
        task = asyncio.ensure_future(run.train(run_dir.latest_checkpoint()))
        asked = False

        def end() -> None:
            nonlocal asked
            if asked:
                # The supervisor, or the kernel, ends the workers; the run resumes as after any other kill.
                progress.close()
                print(f"Ended at once. Continue with: gyre train --resume {run_dir.root}", flush=True)
                os._exit(INTERRUPTED)
            asked = True
            progress.say("Ending: executions are cancelled, processes stopped. Again ends at once.")
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Ignored ones stay so (nohup), but for Ctrl-C, which shells let background jobs ignore.
            if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, end)
        try:
            await task
        except asyncio.CancelledError:
            return True
    return False


async def _attached(order: ControllerOrder) -> bool:
    config = decode_config(order.config, RunConfig)
    supervisor = connect(ProcessSupervisor, order.supervisor, order.secret)
    try:
        launcher = SupervisedLauncher(supervisor.stub, order.secret, order.host, order.scratch)
        return await control(config, RunDir(Path(order.run_dir)), launcher)
    finally:
        await supervisor.close()


def main() -> int:
    die_with_parent()
    raise_open_files()
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=ControllerOrder)
    try:
        with asyncio.Runner(loop_factory=RunningTimeLoop) as runner:
            return INTERRUPTED if runner.run(_attached(order)) else 0
    except ConfigError as error:
        print(f"gyre: {error}", file=sys.stderr)
        return 2
    except GyreError as error:
        print(f"gyre: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
