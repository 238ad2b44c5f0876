"""Files that a user names by an option of a command."""

import sys
from pathlib import Path

from gyre.core.errors import ConfigError

STANDARD_OUTPUT = Path("-")


def write_output(path: Path, content: bytes, option: str) -> None:
    """Overwrites; the path `-` is the standard output. Raises ConfigError, naming `option`, when the file cannot be
    written."""
    if path == STANDARD_OUTPUT:
        sys.stdout.buffer.write(content)
        return
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): choose another file for {option}.") from error
