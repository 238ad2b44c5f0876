"""`gyre train`: preflight, the run with its live display, and the report at its end."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from gyre.api import Training, load_config, prepare, prepare_resumption
from gyre.cli.commands.report import final_report
from gyre.cli.controller import INTERRUPTED, control
from gyre.cli.supervise import supervise
from gyre.control.live.config import RunConfig
from gyre.core.errors import ConfigError
from gyre.core.running_time import RunningTimeLoop
from gyre.core.system.programs import raise_open_files
from gyre.launch.section import HereSection
from gyre.store import RunDir


def train(path: Path | None, overrides: Sequence[str], directory: Path | None, resume: Path | None) -> int:
    """Returns 0 when the run completed and 130 when it was interrupted; raises ConfigError before anything starts."""
    with _prepare(path, overrides, directory, resume) as training:
        for note in training.notes:
            print(f"Note: {note}.")
        run_dir = training.run_dir
        raise_open_files()
        print(f"Run directory: {run_dir.root}")
        code = _run_to_end(training.config, run_dir)
    if code in (0, INTERRUPTED):
        final_report(run_dir.root)
    if code == INTERRUPTED:
        print(f"Interrupted. Continue with: gyre train --resume {run_dir.root}")
    return code


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


def _run_to_end(config: RunConfig, run_dir: RunDir) -> int:
    """The exit code: of a controller that this process supervises, or, on a Ray cluster, of one in this process."""
    if isinstance(config.launch, HereSection):
        return supervise(config, run_dir)
    with asyncio.Runner(loop_factory=RunningTimeLoop) as runner:
        return INTERRUPTED if runner.run(control(config, run_dir, None)) else 0
