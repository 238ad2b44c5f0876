"""`gyre train`: preflight, the run with its live display, and the report at its end."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from gyre.api import Training, load_config, prepare, prepare_resumption
from gyre.cli.progress import Progress
from gyre.cli.report import final_report
from gyre.core.errors import ConfigError
from gyre.core.running_time import RunningTimeLoop


def train(path: Path | None, overrides: Sequence[str], directory: Path | None, resume: Path | None) -> int:
    """Returns 0 when the run completed and 130 when it was interrupted; raises ConfigError before anything starts."""
    with _prepare(path, overrides, directory, resume) as training:
        for note in training.notes:
            print(f"Note: {note}.")
        root = training.run_dir.root
        print(f"Run directory: {root}")
        interrupted = _run_to_end(training)
    final_report(root)
    if interrupted:
        print(f"Interrupted. Continue with: gyre train --resume {root}")
    return 130 if interrupted else 0


def _prepare(path: Path | None, overrides: Sequence[str], directory: Path | None, resume: Path | None) -> Training:
    if resume is not None:
        if directory is not None:
            raise ConfigError("--resume continues in the run's own directory; leave --run-dir out")
        # With --resume the first positional argument is an override already.
        return prepare_resumption(resume, *([] if path is None else [str(path)]), *overrides)
    if path is None:
        raise ConfigError("name a config file, or a run with --resume")
    directory = directory or Path("runs") / f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return prepare(load_config(path, *overrides), str(path), run_dir=directory)


def _run_to_end(training: Training) -> bool:
    with asyncio.Runner(loop_factory=RunningTimeLoop) as runner:
        return runner.run(_run(training))


async def _run(training: Training) -> bool:
    """Whether the run was interrupted. The first Ctrl-C ends it in order, the second at once; children are not in the
    terminal's group."""
    with Progress() as progress:
        task = asyncio.ensure_future(training.run(progress.update))
        asked = False

        def end() -> None:
            nonlocal asked
            if asked:
                # The kernel ends the workers when this process is gone; the run resumes as after any other kill.
                progress.close()
                print(f"Ended at once. Continue with: gyre train --resume {training.run_dir.root}", flush=True)
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
