"""`gyre export RUN --hf DIR`: a checkpoint as a Hugging Face model directory."""

from pathlib import Path

from gyre.cli.console import open_console
from gyre.core.errors import ConfigError
from gyre.store import RunDir
from gyre.training.storage.export import DTYPES, export_hf


def export(run_dir: Path, hf: Path, version: int | None = None, dtype: str = "float32") -> int:
    """The newest checkpoint, or that of `version`. Raises ConfigError when the run does not have it, for an unknown
    `dtype`, or when `hf` cannot be made or is not empty."""
    kind = next((known for known in DTYPES if known == dtype), None)
    if kind is None:
        raise ConfigError(f"--dtype {dtype} is not known: use one of {', '.join(DTYPES)}.")
    checkpoint = RunDir.open(run_dir).checkpoint(version)
    if checkpoint is None:
        raise ConfigError(f"{run_dir} has no complete checkpoint yet: wait for the first one or let the run finish.")
    if hf.exists() and not hf.is_dir():
        raise ConfigError(f"{hf} is a file: name a directory for --hf.")
    try:
        done = export_hf(str(checkpoint.path), str(hf), kind)
    except OSError as error:
        raise ConfigError(f"{hf} cannot be written ({error.strerror}): choose another directory for --hf.") from error
    said = f"{done.parameters:,} parameters in {done.tensors} tensors of {done.dtype}"
    if done.rounded:
        said += f", {done.rounded:.1%} of them rounded (--dtype float32 rounds none)"
    open_console().print(
        f"Version {checkpoint.version} of {run_dir} is in {hf}: {said}.", soft_wrap=True, highlight=False, markup=False
    )
    return 0
