"""Host-side handling of directories that the policy could write: nothing here follows a link out of them."""

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

from gyre.core.errors import SandboxError

TAIL_BYTES = 500


async def copy(source: str | Path, target: Path) -> None:
    """Copies a file or directory as `cp -a` does: links stay links, FIFOs and sockets are copied as such, and a source
    that ends in "/." is a directory's content. Raises SandboxError."""
    process = await asyncio.create_subprocess_exec(
        "cp", "-a", "--reflink=auto", str(source), str(target), stderr=asyncio.subprocess.PIPE
    )
    try:
        _, message = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        raise SandboxError(f"could not copy {source} to {target}: {message.decode(errors='replace').strip()}.")


def ensure_inside(path: Path, directory: Path, sandbox: str) -> Path:
    """`path`, when its parent lies in `directory` after following every link. Raises SandboxError."""
    parent = directory if path == directory else path.parent
    if not parent.resolve().is_relative_to(directory.resolve()):
        raise SandboxError(f"sandbox {sandbox}: {path} leads out of the sandbox through a link.")
    return path


def remove_tree(path: Path) -> None:
    """Removes a directory whatever the permissions of what it holds; it may be missing."""

    def unlock(function: Any, failed: str, error: Any) -> None:
        if isinstance(error[1], FileNotFoundError):
            return
        os.chmod(os.path.dirname(failed), 0o700)
        if os.path.isdir(failed) and not os.path.islink(failed):
            os.chmod(failed, 0o700)
            shutil.rmtree(failed)
        else:
            function(failed)

    shutil.rmtree(path, onerror=unlock)


def tail(path: Path) -> str:
    """The end of a log file, for an error message."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace").strip()
