"""The policy's tokenizer, from disk only."""

from pathlib import Path
from typing import Any

from gyre.core.errors import ConfigError


def load_tokenizer(directory: str) -> Any:
    """A Hugging Face fast tokenizer. Raises ConfigError when the directory holds none."""
    from transformers import AutoTokenizer  # takes seconds to import

    if not (Path(directory) / "tokenizer.json").is_file():
        raise ConfigError(f"{directory} has no tokenizer.json; name the directory with the policy's tokenizer.")
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)
