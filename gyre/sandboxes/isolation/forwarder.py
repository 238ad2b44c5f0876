"""The way from an image's sandbox to the proxy: socat outside, in a network namespace that the sandbox enters.

The namespace is not the sandbox's own, so root inside cannot change it; it may listen on every port, as in Docker. The
forwarder dies with the runner, and lives as long as its sandbox.
"""

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from gyre.core.errors import SandboxError
from gyre.sandboxes.isolation.host import JOIN
from gyre.sandboxes.tree import ProcessTree

CONNECTIONS = 256
"""At a time, through one forwarder."""
SERVE = """
echo 0 >/proc/sys/net/ipv4/ip_unprivileged_port_start
socat -d -d "TCP-LISTEN:8080,bind=127.0.0.1,fork,reuseaddr,max-children=$2" "UNIX-CONNECT:$1" 2>&1 | {
  while read -r line; do case $line in *"listening on"*) echo listening >&2; break ;; esac; done
  exec cat >/dev/null
}
"""
START_S = 30.0


class Forwarder:
    """`netns` is a descriptor of the network namespace in which PROXY_URL answers."""

    def __init__(self, tree: ProcessTree, netns: int) -> None:
        self.netns = netns
        self._tree = tree

    @classmethod
    async def open(cls, socket: Path, name: str, cgroups: Sequence[Path]) -> "Forwarder":
        """Returns when it listens. Raises SandboxError."""
        info_read, info_write = os.pipe()
        ready_read, ready_write = os.pipe()
        joined = [str(cgroup / "cgroup.procs") for cgroup in cgroups]
        bwrap = shutil.which("bwrap") or "bwrap"
        command = ["/bin/sh", "-c", JOIN, "join", *joined, "--", bwrap, "--unshare-net", "--unshare-pid"]
        command += ["--die-with-parent", "--cap-drop", "ALL", "--dev-bind", "/", "/", "--proc", "/proc"]
        command += ["--info-fd", str(info_write), "--", "/bin/sh", "-c", SERVE, "serve", str(socket), str(CONNECTIONS)]
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=ready_write,
                cwd="/",
                pass_fds=(info_write,),
                start_new_session=True,
            )
        except BaseException:
            os.close(info_read)
            os.close(ready_read)
            raise
        finally:
            os.close(info_write)
            os.close(ready_write)
        tree = ProcessTree(process, info_read, ready_read, ready=b"listening\n")
        try:
            async with asyncio.timeout(START_S):
                listening = await tree.booted()
            if not listening or tree.init_pid is None:
                raise SandboxError(f"sandbox {name}: the forwarder to the proxy did not start.")
            return cls(tree, os.open(f"/proc/{tree.init_pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        except BaseException as error:
            await tree.kill()
            if isinstance(error, TimeoutError | OSError):
                raise SandboxError(f"sandbox {name}: the forwarder to the proxy did not start ({error}).") from error
            raise

    async def close(self) -> None:
        await self._tree.kill()
        os.close(self.netns)
