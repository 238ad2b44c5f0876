"""Content digest of a workspace: what an assessment is bound to."""

import asyncio
import hashlib
import os
import stat
import threading
from pathlib import Path


async def digest(directory: Path) -> str:
    """Hex SHA-256 over names, kinds, executable bits, link targets and file contents; order and times do not matter.
    Links are not followed, FIFOs and sockets are not opened, and what cannot be read counts as its error number.

    Reads in a thread; cancelled, it ends behind the file that it reads: a policy can leave terabytes of holes."""
    cancelled = threading.Event()
    try:
        return await asyncio.to_thread(_digest, directory, cancelled)
    finally:
        cancelled.set()


def _digest(directory: Path, cancelled: threading.Event) -> str:
    total = hashlib.sha256()
    # A stack, not recursion: a policy may nest directories deeper than Python may recurse.
    root = str(directory)
    pending = [root]
    while pending and not cancelled.is_set():
        path = pending.pop()
        try:
            kind, content, below = _entry(path)
        except OSError as error:
            kind, content, below = -1, str(error.errno).encode(), []
        for part in (os.fsencode(path[len(root) :]), str(kind).encode(), content):
            total.update(len(part).to_bytes(8, "little") + part)
        pending += below
    return total.hexdigest()


def _entry(path: str) -> tuple[int, bytes, list[str]]:
    """Kind, content digest and, of a directory, the entries to visit, last first."""
    mode = os.lstat(path).st_mode
    if stat.S_ISDIR(mode):
        return stat.S_IFDIR, b"", [os.path.join(path, name) for name in sorted(os.listdir(path), reverse=True)]
    if stat.S_ISLNK(mode):
        return stat.S_IFLNK, os.fsencode(os.readlink(path)), []
    if stat.S_ISREG(mode):
        with open(path, "rb") as file:
            return stat.S_IFREG | (mode & stat.S_IXUSR), hashlib.file_digest(file, "sha256").digest(), []
    return stat.S_IFMT(mode), b"", []
