"""Whether two machines have the same file."""

from hashlib import blake2b
from pathlib import Path

HEAD = 1 << 20
"""Bytes that are compared, beside the length: of weights, their names and shapes. The rest would take minutes."""


def fingerprint(path: Path) -> str:
    """Of length and beginning; "" when the file cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
            return f"{path.stat().st_size}-{blake2b(head, digest_size=16).hexdigest()}"
    except OSError:
        return ""
