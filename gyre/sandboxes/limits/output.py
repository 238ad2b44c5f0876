"""Output of a sandbox on its way to a file of the host: the first MiB are kept, the rest is counted and dropped.

A process beside the sandbox does it, so that neither a flood nor a slow disk costs the runner's event loop anything.
What is inside holds a pipe, never the file.
"""

import asyncio
import os
from pathlib import Path

# Unbuffered, so that a log can be read while it grows.
_KEEP = """
stdbuf -o0 head -c "$1"
n=$(wc -c)
[ "$n" = 0 ] || printf '\\n[%s more bytes were dropped: sandbox.limits.output_mb]\\n' "$n"
"""


class Drain:
    """Appends what is written to the pipe `fd` to a file. Close `fd` in this process after the sandbox has it."""

    def __init__(self, process: asyncio.subprocess.Process, fd: int) -> None:
        self.fd = fd
        self._process = process

    @classmethod
    async def open(cls, path: Path, most_mb: int) -> "Drain":
        """Raises OSError when the file cannot be written."""
        reading, writing = os.pipe()
        try:
            with path.open("ab") as file:
                process = await asyncio.create_subprocess_exec(
                    *("/bin/sh", "-c", _KEEP, "drain", str(most_mb << 20)),
                    stdin=reading,
                    stdout=file,
                    stderr=asyncio.subprocess.DEVNULL,
                    cwd="/",
                    start_new_session=True,
                )
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)
        return cls(process, writing)

    def close(self) -> None:
        """Closes our end of the pipe. Safe to call twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    async def finish(self) -> None:
        """Returns when all that was written is in the file. Every process that had the pipe must have ended."""
        self.close()
        await self._process.wait()
