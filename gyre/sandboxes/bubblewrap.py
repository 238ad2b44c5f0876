"""`Sandbox` on bubblewrap: all namespaces, read-only system, non-root user, network = the proxy's unix socket.

One bubblewrap process per `exec`. Measured: about 10 ms to boot without a proxy, 15 ms with the forwarder.
"""

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from gyre.core.clock import Clock, SystemClock
from gyre.core.errors import ConfigError, SandboxError
from gyre.core.paths import HOME
from gyre.sandboxes.base import ExecResult, SandboxSpec
from gyre.sandboxes.files import copy, ensure_inside, remove_tree, tail
from gyre.sandboxes.limits import limited, make_cgroups, remove_cgroups
from gyre.sandboxes.tree import ProcessTree

log = logging.getLogger(__name__)

BUSY_TRIES, BUSY_S = 100, 0.02
"""How often, and how far apart, the removal of a cgroup is tried."""
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
UID = "1000"
NAMESPACES = ("--unshare-all", "--unshare-user", "--disable-userns")
"""Every namespace, the user namespace without fail, and none that a sandbox could make itself (bubblewrap 0.8)."""

ETC = {
    "passwd": f"root:x:0:0:root:/root:/bin/sh\nagent:x:{UID}:{UID}:agent:{HOME}:/bin/bash\n",
    "group": f"root:x:0:\nagent:x:{UID}:\n",
    "hosts": "127.0.0.1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
HOST_ETC = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/ssl/certs")
"""All that a dynamic linker and Debian's alternatives need; nothing else of the host's /etc is visible."""

# $1 is the fd that tells the host that the command starts now. The forwarder reports on a FIFO that it listens; the
# FIFO is drained afterwards because socat goes on reporting. Workers ignore SIGINT; what a harness starts must not.
START = """
ready=$1; shift
if [ -S /run/proxy.sock ]; then
  mkfifo /run/forwarder; exec 3<>/run/forwarder
  ( socat -d -d TCP-LISTEN:8080,bind=127.0.0.1,fork,reuseaddr UNIX-CONNECT:/run/proxy.sock 2>/run/forwarder & )
  while read -r line <&3; do
    case $line in *"listening on"*) break ;; *" E "*) echo "$line" >&2; exit 125 ;; esac
  done
  ( cat <&3 >/dev/null & )
  exec 3<&-
fi
echo ready >&"$ready"; exec {ready}>&-
exec env --default-signal "$@"
"""


class BubblewrapSandbox:
    """See `sandboxes.base.Sandbox`. Raises ConfigError at once when bwrap or socat is not installed."""

    def __init__(
        self, spec: SandboxSpec, *, bwrap: str = "bwrap", term_grace_s: float = 2.0, clock: Clock | None = None
    ) -> None:
        self.spec = spec
        self._term_grace_s = term_grace_s
        self._clock = clock or SystemClock()
        self.cgroups: list[Path] = []
        """Empty before `start`, and where no cgroup can be made."""
        self._used = False
        self._running: set[ProcessTree] = set()
        found = shutil.which(bwrap)
        if found is None:
            raise ConfigError(f"{bwrap} is not installed, sandboxes need it: apt-get install bubblewrap.")
        if spec.proxy_socket and not shutil.which("socat", path=SYSTEM_PATH):
            raise ConfigError("socat is not installed, sandboxes need it: apt-get install socat.")
        self._bwrap = found

    async def start(self) -> None:
        spec = self.spec
        try:
            # Closed to other users: it holds the session's key, and the policy may make setuid files in it.
            spec.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for directory in (spec.workspace, spec.home, spec.tmp, spec.root / "etc"):
                directory.mkdir(parents=True, exist_ok=True)
            for part in ("agent", "artifacts", "verifier"):
                (spec.logs / part).mkdir(parents=True, exist_ok=True)
            for name, text in ETC.items():
                (spec.root / "etc" / name).write_text(text)
        except OSError as error:
            raise SandboxError(f"sandbox {spec.name}: {error.filename}: {error.strerror}.") from error
        self.cgroups = make_cgroups(spec.limits)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdout: Path,
        stderr: Path,
        timeout_s: float,
        boot_timeout_s: float,
        env: Mapping[str, str] | None = None,
        stdin: Path | None = None,
        on_boot: Callable[[], None] | None = None,
    ) -> ExecResult:
        self._used = True
        started = self._clock.now()
        spawning = asyncio.ensure_future(self._spawn(argv, env or {}, stdin, stdout, stderr))
        try:
            tree = await asyncio.shield(spawning)
        except asyncio.CancelledError:
            # asyncio would end bubblewrap alone, and leave the child that it may have made.
            await (await spawning).kill()
            raise
        self._running.add(tree)
        try:
            try:
                async with asyncio.timeout(boot_timeout_s):
                    booted = await tree.booted()
            except TimeoutError:
                raise SandboxError(f"sandbox {self.spec.name}: not booted within {boot_timeout_s:g} s.") from None
            if not booted:
                raise SandboxError(f"sandbox {self.spec.name}: could not boot: {tail(stderr) or 'no message'}")
            running = self._clock.now()
            if on_boot is not None:
                on_boot()
            code: int | None
            try:
                async with asyncio.timeout(timeout_s):
                    code = await tree.wait()
            except TimeoutError:
                code = None
                await tree.terminate(self._term_grace_s)
            return ExecResult(
                exit_code=code,
                timed_out=code is None,
                boot_s=running - started,
                seconds=self._clock.now() - running,
            )
        except asyncio.CancelledError:
            await asyncio.shield(tree.terminate(self._term_grace_s))
            raise
        finally:
            await tree.kill()
            self._running.discard(tree)

    async def upload(self, source: Path, target: str) -> None:
        if self._used:
            raise SandboxError(f"sandbox {self.spec.name}: upload to {target} after an exec; upload before it.")
        await copy(f"{source}/.", self._host_path(target))

    async def download(self, source: str, target: Path) -> None:
        await copy(self._host_path(source), target)

    async def close(self, *, keep: bool) -> None:
        for tree in list(self._running):
            await tree.terminate(self._term_grace_s)
        for _ in range(BUSY_TRIES):
            self.cgroups = remove_cgroups(self.cgroups)
            if not self.cgroups:
                break
            await self._clock.sleep(BUSY_S)
        else:
            log.warning("sandbox %s: left to the next runner, still busy: %s", self.spec.name, self.cgroups)
            self.cgroups = []
        if not keep:
            await remove_tree(self.spec.root)

    def _writable(self) -> dict[str, Path]:
        """Writable directories: path inside → host directory. Their parents are not writable from inside, so the
        policy cannot replace a directory by a link and have bubblewrap bind what it points at."""
        spec = self.spec
        logs = {f"/logs/{part}": spec.logs / part for part in ("agent", "artifacts", "verifier")}
        # The work directory comes last: it may lie below another one.
        return {HOME: spec.home, "/tmp": spec.tmp, **logs, spec.workdir: spec.workspace}

    def _host_path(self, inside: str) -> Path:
        """Host path of a path below a writable directory; links on the way must stay below it."""
        path = PurePosixPath(inside)
        for mounted, directory in reversed(self._writable().items()):
            if path.is_relative_to(mounted):
                return ensure_inside(directory / path.relative_to(mounted), directory, self.spec.name)
        raise SandboxError(f"sandbox {self.spec.name}: {inside} is in no writable directory.")

    def _arguments(self) -> list[str]:
        spec = self.spec
        arguments = [*NAMESPACES, "--cap-drop", "ALL"]
        arguments += ["--uid", UID, "--gid", UID, "--hostname", "sandbox", "--die-with-parent"]
        arguments += ["--ro-bind", "/usr", "/usr"]
        for name in ("bin", "lib", "lib64", "sbin"):
            host = Path("/", name)
            if host.is_symlink():
                arguments += ["--symlink", os.readlink(host), f"/{name}"]
            elif host.is_dir():
                arguments += ["--ro-bind", f"/{name}", f"/{name}"]
        for path in HOST_ETC:
            arguments += ["--ro-bind-try", path, path]
        for name in ETC:
            arguments += ["--ro-bind", str(spec.root / "etc" / name), f"/etc/{name}"]
        arguments += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/run"]
        for inside, directory in self._writable().items():
            arguments += ["--bind", str(directory), inside]
        for mount in spec.mounts:
            arguments += ["--ro-bind", str(mount.source), mount.target]
        if spec.proxy_socket is not None:
            # Read-only, or one sandbox could change the mode of the socket that all share; connecting needs no more.
            arguments += ["--ro-bind", str(spec.proxy_socket), "/run/proxy.sock"]
        return [*arguments, "--remount-ro", "/", "--chdir", spec.workdir]

    async def _spawn(
        self, argv: Sequence[str], env: Mapping[str, str], stdin: Path | None, stdout: Path, stderr: Path
    ) -> ProcessTree:
        full_env = {"PATH": SYSTEM_PATH, "HOME": HOME, "USER": "agent", "LANG": "C.UTF-8", **self.spec.env, **env}
        info_read, info_write = os.pipe()
        ready_read, ready_write = os.pipe()
        command = [self._bwrap, *self._arguments(), "--info-fd", str(info_write)]
        command += ["--", "/bin/bash", "--noprofile", "--norc", "-c", START, "start", str(ready_write), *argv]
        with contextlib.ExitStack() as files:
            for fd in (info_write, ready_write):
                files.callback(os.close, fd)
            try:
                process = await asyncio.create_subprocess_exec(
                    *limited(command, self.spec.limits, self.cgroups),
                    stdin=files.enter_context(stdin.open("rb")) if stdin else asyncio.subprocess.DEVNULL,
                    stdout=files.enter_context(stdout.open("ab")),
                    stderr=files.enter_context(stderr.open("ab")),
                    env=full_env,
                    cwd="/",
                    pass_fds=(info_write, ready_write),
                    start_new_session=True,
                )
            except OSError as error:
                os.close(info_read)
                os.close(ready_read)
                raise SandboxError(f"sandbox {self.spec.name}: could not start {argv[0]}: {error.strerror}.") from error
        return ProcessTree(process, info_read, ready_read)
