"""Exports a checkpoint as a plain Hugging Face model directory."""

import shutil
from pathlib import Path

from gyre.core.errors import ConfigError

_ONLY_FOR_TRAINING = {"optimizer.safetensors", "trainer.json"}


def export_hf(checkpoint_dir: str, out_dir: str) -> None:
    """Writes weights, config and tokenizer of a checkpoint to `out_dir`, which `AutoModelForCausalLM` can load.

    Raises ConfigError when `checkpoint_dir` is not a checkpoint or `out_dir` is not empty.
    """
    source, target = Path(checkpoint_dir), Path(out_dir)
    if not (source / "trainer.json").is_file():
        raise ConfigError(f"{checkpoint_dir} is not a checkpoint: it has no trainer.json")
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{out_dir} is not empty: choose another directory to export to")
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name not in _ONLY_FOR_TRAINING:
            shutil.copyfile(file, target / file.name)
