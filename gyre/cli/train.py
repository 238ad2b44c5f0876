"""`gyre train`: preflight, the run with its live display, and the report at its end."""

import asyncio
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from gyre.cli.doctor import check_bwrap, check_namespaces, check_socat, first_line
from gyre.cli.progress import Progress
from gyre.cli.report import final_report
from gyre.control.live.config import RunConfig, check
from gyre.control.live.run import run
from gyre.core import config as configs
from gyre.core.errors import ConfigError
from gyre.engines.section import SglangSection
from gyre.harnesses import check as check_harness
from gyre.harnesses import load_profile
from gyre.launch.local import LOOPBACK
from gyre.launch.section import HereSection
from gyre.proxy.tokenizer import load_tokenizer
from gyre.store import RunDir
from gyre.store.rundir import Checkpoint
from gyre.tasks import load_tasks
from gyre.trajectory.render import ChatRenderer, RenderError


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
        claim = run_dir.claim()
        checkpoint = run_dir.latest_checkpoint()
        if checkpoint is not None and checkpoint.version >= config.scheduler.max_steps:
            raise ConfigError(
                f"{run_dir.root} is complete: its checkpoint is of step {checkpoint.version} and scheduler.max_steps = "
                f"{config.scheduler.max_steps}; append a larger one to train on"
            )
        preflight(config, str(run_dir.config))
    else:
        if path is None:
            raise ConfigError("name a config file, or a run with --resume")
        config = configs.load(path, overrides, RunConfig)
        preflight(config, str(path))
        directory = directory or Path("runs") / f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        run_dir = RunDir.create(directory, configs.dump(config))
        claim = run_dir.claim()
    print(f"Run directory: {run_dir.root}")
    with claim:
        interrupted = asyncio.run(_run(config, run_dir, checkpoint))
    final_report(run_dir.root)
    if interrupted:
        print(f"Interrupted. Continue with: gyre train --resume {run_dir.root}")
    return 130 if interrupted else 0


def preflight(config: RunConfig, where: str) -> None:
    """Everything that can be known to fail before a process starts, as one sentence."""
    check(config, where)
    load_tasks(config.tasks.root)
    check_harness(load_profile(config.harness.name), config.harness.root)
    check_renderer(config, where)
    if isinstance(config.engine, SglangSection) and isinstance(config.launch, HereSection):
        check_sglang(config.engine.python, where)
    for sandboxes_need in (check_bwrap, check_namespaces, check_socat):
        if not (found := sandboxes_need()).ok:
            raise ConfigError(f"sandboxes cannot start: {found.name}: {found.found}; {found.advice}")
    if config.rollout.port:
        try:
            socket.create_server((LOOPBACK, config.rollout.port)).close()
        except OSError as error:
            raise ConfigError(
                f"{where}: rollout.port = {config.rollout.port} cannot be used on {LOOPBACK} ({error.strerror}); "
                "choose another one, or leave it out when only sandboxes need the proxy"
            ) from None


def check_renderer(config: RunConfig, where: str) -> None:
    """Whether a proxy worker could render with the policy's tokenizer."""
    policy = config.policy
    try:
        ChatRenderer(load_tokenizer(str(policy.model)), policy.renderer, thinking=policy.thinking)
    except RenderError as error:
        raise ConfigError(
            f'{where}: policy.renderer = "{policy.renderer}" is not the family of policy.model = {policy.model}; '
            f"name the one that it is of ({error})"
        ) from error
    except Exception as error:  # of any type, for a file that is no tokenizer
        raise ConfigError(
            f"{where}: the tokenizer of policy.model = {policy.model} cannot be read ({type(error).__name__}: {error})"
        ) from error


def check_sglang(python: str, where: str) -> None:
    """Whether `python`, which only the engines run, is an interpreter that has SGLang."""
    if first_line(python, "-c", "from importlib.metadata import version; print(version('sglang'))") is None:
        raise ConfigError(
            f"{where}: engine.python = {python} is no interpreter that has SGLang; name the one of the environment "
            "that it is installed in"
        )


async def _run(config: RunConfig, run_dir: RunDir, checkpoint: Checkpoint | None) -> bool:
    """Whether the run was interrupted. The first Ctrl-C ends it in order; children are not in the terminal's group."""
    with Progress() as progress:
        task = asyncio.ensure_future(run(config, run_dir, checkpoint, progress.update))
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            return True
    return False
