"""Content digest of a workspace: what an assessment is bound to."""

import asyncio
import hashlib
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gyre.core.clock import SystemClock

BLOCK = 1 << 16
ZEROS = bytes(BLOCK)
UNREAD = "unread"
"""Stands for the digest of a workspace that could not be read in time. It equals no digest."""

_readers = ThreadPoolExecutor(os.cpu_count(), "digest")
"""Threads of their own: whoever else works in the default executor does not wait for workspaces."""


async def digest(directory: Path, *, timeout_s: float = 60.0) -> str:
    """Hex SHA-256 over names, kinds, executable bits, link targets and file contents; order and times do not matter,
    nor whether zeros are written or holes. Links are not followed, FIFOs and sockets are not opened, and what cannot be
    read counts as its error number. UNREAD when reading takes longer than `timeout_s`, waiting for a thread apart.

    Holes are not read: a policy can leave terabytes of them. Cancelled, the thread ends behind its block."""
    cancelled = False
    clock: SystemClock | None = None

    def over() -> bool:
        nonlocal clock
        clock = clock or SystemClock()  # Starts in the thread: waiting for one is not reading.
        return cancelled or clock.now() > timeout_s

    try:
        return await asyncio.get_running_loop().run_in_executor(_readers, _digest, directory, over)
    finally:
        cancelled = True


def _digest(directory: Path, over: Callable[[], bool]) -> str:
    total = hashlib.sha256()
    # A stack, not recursion: a policy may nest directories deeper than Python may recurse.
    root = str(directory)
    pending = [root]
    while pending:
        path = pending.pop()
        try:
            kind, content, below = _entry(path, over)
        except OSError as error:
            kind, content, below = -1, str(error.errno).encode(), []
        if over():
            return UNREAD
        for part in (os.fsencode(path[len(root) :]), str(kind).encode(), content):
            total.update(len(part).to_bytes(8, "little") + part)
        pending += below
    return total.hexdigest()


def _entry(path: str, over: Callable[[], bool]) -> tuple[int, bytes, list[str]]:
    """Kind, content digest and, of a directory, the entries to visit, last first."""
    mode = os.lstat(path).st_mode
    if stat.S_ISDIR(mode):
        return stat.S_IFDIR, b"", [os.path.join(path, name) for name in sorted(os.listdir(path), reverse=True)]
    if stat.S_ISLNK(mode):
        return stat.S_IFLNK, os.fsencode(os.readlink(path)), []
    if stat.S_ISREG(mode):
        return stat.S_IFREG | (mode & stat.S_IXUSR), _content(path, over), []
    return stat.S_IFMT(mode), b"", []


def _content(path: str, over: Callable[[], bool]) -> bytes:
    """Digest of the size and of every block that is not all zeros, with its place."""
    total = hashlib.sha256()
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        size = os.fstat(fd).st_size
        total.update(size.to_bytes(8, "little"))
        at = 0
        while at < size and not over():
            try:
                at = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:  # ENXIO: nothing but a hole follows.
                break
            at -= at % BLOCK
            block = os.pread(fd, BLOCK, at)
            if block != ZEROS[: len(block)]:
                total.update(at.to_bytes(8, "little") + block)
            at += BLOCK
    finally:
        os.close(fd)
    return total.digest()
