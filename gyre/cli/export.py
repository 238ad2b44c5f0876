"""`gyre export RUN --hf DIR`: the newest checkpoint as a Hugging Face model directory."""

from pathlib import Path

from gyre.cli.console import open_console
from gyre.core.errors import ConfigError
from gyre.store import RunDir
from gyre.training.export import export_hf


def export(run_dir: Path, hf: Path) -> int:
    """Raises ConfigError when the run has no checkpoint yet or `hf` cannot be made or is not empty."""
    latest = RunDir.open(run_dir).latest_checkpoint()
    if latest is None:
        raise ConfigError(f"{run_dir} has no complete checkpoint yet: wait for the first one or let the run finish.")
    if hf.exists() and not hf.is_dir():
        raise ConfigError(f"{hf} is a file: name a directory for --hf.")
    try:
        export_hf(str(latest.path), str(hf))
    except OSError as error:
        raise ConfigError(f"{hf} cannot be written ({error.strerror}): choose another directory for --hf.") from error
    open_console().print(f"Version {latest.version} of {run_dir} is in {hf}", soft_wrap=True, highlight=False)
    return 0
