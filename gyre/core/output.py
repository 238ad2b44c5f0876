"""Files that a user names by an option of a command."""

from pathlib import Path

from gyre.core.errors import ConfigError


def write_output(path: Path, content: bytes, option: str) -> None:
    """Overwrites. Raises ConfigError, naming `option`, when the file cannot be written."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): choose another file for {option}.") from error
