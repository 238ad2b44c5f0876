"""`gyre train`: preflight, the run with its live display, and the report at its end."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from gyre.cli.controller import INTERRUPTED, control
from gyre.cli.report import final_report
from gyre.cli.supervise import supervise
from gyre.control.live.config import RunConfig
from gyre.control.live.preflight import preflight
from gyre.core import config as configs
from gyre.core.errors import ConfigError
from gyre.core.programs import raise_open_files
from gyre.core.running_time import RunningTimeLoop
from gyre.launch.section import HereSection
from gyre.store import RunDir


def train(path: Path | None, overrides: Sequence[str], directory: Path | None, resume: Path | None) -> int:
    """Returns 0 when the run completed and 130 when it was interrupted; raises ConfigError before anything starts."""
    if resume is not None:
        if directory is not None:
            raise ConfigError("--resume continues in the run's own directory; leave --run-dir out")
        run_dir = RunDir.open(resume)
        # With --resume the first positional argument is an override already.
        changes = [*([] if path is None else [str(path)]), *overrides]
        config = configs.load(run_dir.config, changes, RunConfig)
        notes = preflight(config, str(run_dir.config), resume=run_dir)
        claim = run_dir.claim()
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
        code = _run_to_end(config, run_dir)
    if code in (0, INTERRUPTED):
        final_report(run_dir.root)
    if code == INTERRUPTED:
        print(f"Interrupted. Continue with: gyre train --resume {run_dir.root}")
    return code


def _run_to_end(config: RunConfig, run_dir: RunDir) -> int:
    """The exit code: of a controller that this process supervises, or, on a Ray cluster, of one in this process."""
    if isinstance(config.launch, HereSection):
        return supervise(config, run_dir)
    with asyncio.Runner(loop_factory=RunningTimeLoop) as runner:
        return INTERRUPTED if runner.run(control(config, run_dir, None)) else 0
