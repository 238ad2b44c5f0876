"""A user namespace of its own for each sandbox that root starts.

    holder:  unshare --user          then root maps the ids, and keeps the namespace by a descriptor
             max_user_namespaces = 0 nothing inside can make another one

bubblewrap enters it before it makes any other namespace, so all of them belong to it. Because the namespace is made by
root, this also works where the kernel denies user namespaces to other users.
"""

import asyncio
import contextlib
import os
from pathlib import Path

from gyre.core.errors import SandboxError
from gyre.sandboxes.isolation.ids import IdRange

_HOLD = "echo; read -r _"
_NO_MORE = "echo 0 >/proc/sys/user/max_user_namespaces"


async def make_userns(ids: IdRange, *, nested: bool = False) -> int:
    """A descriptor of the namespace, which lives as long as it, or a process inside. With `nested`, what runs
    there may make further ones. Raises SandboxError."""
    pipe = asyncio.subprocess.PIPE
    holder = await asyncio.create_subprocess_exec(
        "unshare", "--user", "/bin/sh", "-c", _HOLD, stdin=pipe, stdout=pipe, stderr=pipe
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stderr is not None
    userns = -1
    try:
        if not await holder.stdout.readline():
            raise SandboxError(f"no user namespace: {(await holder.stderr.read()).decode(errors='replace').strip()}")
        proc = Path("/proc", str(holder.pid))
        for name in ("uid_map", "gid_map"):
            (proc / name).write_text(f"0 {ids.first} {ids.count}\n")
        userns = os.open(proc / "ns/user", os.O_RDONLY | os.O_CLOEXEC)
        if not nested:
            await _inside(userns, _NO_MORE)
    except BaseException as error:
        if userns >= 0:
            os.close(userns)
        if isinstance(error, OSError):
            raise SandboxError(f"no user namespace over ids {ids.first}…: {error.strerror}") from error
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            holder.kill()
        await holder.wait()
        holder.stdin.close()
    return userns


async def _inside(userns: int, script: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *("nsenter", f"--user=/proc/self/fd/{userns}", "/bin/sh", "-c", script),
        stderr=asyncio.subprocess.PIPE,
        pass_fds=(userns,),
    )
    _, message = await process.communicate()
    if process.returncode:
        raise SandboxError(f"no user namespace: {message.decode(errors='replace').strip()}")
