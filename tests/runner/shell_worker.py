"""The real runner worker, with the profiles of a test's directory."""

import os
from pathlib import Path

from gyre.harnesses import profile
from gyre.launch.base import WorkerContext
from gyre.runner import shim, worker
from gyre.runner.config import RunnerConfig


async def main(config: RunnerConfig, context: WorkerContext) -> None:
    profile.PROFILES = Path(os.environ["TEST_PROFILES"])
    await worker.main(config, context)


async def held(config: RunnerConfig, context: WorkerContext) -> None:
    """The real shim."""
    profile.PROFILES = Path(os.environ["TEST_PROFILES"])
    await shim.main(config, context)
