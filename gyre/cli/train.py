"""`gyre train`: preflight, the run with its live display, and the report at its end."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from gyre.cli.progress import Progress
from gyre.cli.report import final_report
from gyre.control.live.config import RunConfig
from gyre.control.live.preflight import preflight
from gyre.control.live.run import Run
from gyre.core import config as configs
from gyre.core.errors import ConfigError
from gyre.core.programs import raise_open_files
from gyre.core.running_time import RunningTimeLoop
from gyre.store import RunDir
from gyre.store.rundir import Checkpoint


def train(path: Path | None, overrides: Sequence[str], directory: Path | None, resume: Path | None) -> int:
    """Returns 0 when the run completed and 130 when it was interrupted; raises ConfigError before anything starts."""
    checkpoint: Checkpoint | None = None
    if resume is not None:
        if directory is not None:
            raise ConfigError("--resume continues in the run's own directory; leave --run-dir out")
        run_dir = RunDir.open(resume)
        # With --resume the first positional argument is an override already.
        changes = [*([] if path is None else [str(path)]), *overrides]
        config = configs.load(run_dir.config, changes, RunConfig)
        notes = preflight(config, str(run_dir.config), resume=run_dir)
        claim = run_dir.claim()
        checkpoint = run_dir.latest_checkpoint()
    else:
        if path is None:
            raise ConfigError("name a config file, or a run with --resume")
        config = configs.load(path, overrides, RunConfig)
        directory = directory or Path("runs") / f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        notes = preflight(config, str(path), run_dir=directory)
        run_dir = RunDir.create(directory, configs.dump(config))
        claim = run_dir.claim()
    for note in notes:
        print(f"Note: {note}.")
    raise_open_files()
    print(f"Run directory: {run_dir.root}")
    with claim:
        interrupted = _run_to_end(config, run_dir, checkpoint)
    final_report(run_dir.root)
    if interrupted:
        print(f"Interrupted. Continue with: gyre train --resume {run_dir.root}")
    return 130 if interrupted else 0


def _run_to_end(config: RunConfig, run_dir: RunDir, checkpoint: Checkpoint | None) -> bool:
    with asyncio.Runner(loop_factory=RunningTimeLoop) as runner:
        return runner.run(_run(config, run_dir, checkpoint))


async def _run(config: RunConfig, run_dir: RunDir, checkpoint: Checkpoint | None) -> bool:
    """Whether the run was interrupted. The first Ctrl-C ends it in order, the second at once; children are not in the
    terminal's group."""
    with Progress() as progress:
        task = asyncio.ensure_future(Run(config, run_dir, progress.update).train(checkpoint))
        asked = False

        def end() -> None:
            nonlocal asked
            if asked:
                # The kernel ends the workers when this process is gone; the run resumes as after any other kill.
                progress.close()
                print(f"Ended at once. Continue with: gyre train --resume {run_dir.root}", flush=True)
                os._exit(130)
            asked = True
            progress.say("Ending: executions are cancelled, processes stopped. Again ends at once.")
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                asyncio.get_running_loop().add_signal_handler(number, end)
        try:
            await task
        except asyncio.CancelledError:
            return True
    return False
