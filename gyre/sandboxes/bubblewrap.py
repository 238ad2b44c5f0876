"""`Sandbox` on bubblewrap: all namespaces, read-only system, unprivileged user, network = the proxy's unix socket.

One bubblewrap process per `exec`, over directories of the host that stay. What is inside has an unprivileged id of the
host (`gyre.sandboxes.ids`), no capability, a filter of system calls, and a /proc that it cannot write; /sys is absent.
"""

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from gyre.core.errors import SandboxError
from gyre.core.paths import HOME
from gyre.sandboxes import cgroups
from gyre.sandboxes.base import ExecResult, SandboxSpec
from gyre.sandboxes.files import copy, ensure_inside, give, remove_tree, tail
from gyre.sandboxes.host import CAPABILITIES, SYSTEM_PATH, UIDS, Host
from gyre.sandboxes.ids import ROOT
from gyre.sandboxes.output import Drain
from gyre.sandboxes.seccomp import open_program
from gyre.sandboxes.tree import ProcessTree
from gyre.sandboxes.userns import make_userns

log = logging.getLogger(__name__)

BUSY_TRIES, BUSY_S = 100, 0.02
"""How often, and how far apart, the removal of a cgroup is tried."""
RUN_MB = 16
"""Size of /run, which holds a socket and a FIFO."""
_numbers = itertools.count()

ETC = {
    "passwd": "".join(f"{name}:x:{uid}:{uid}:{name}:{HOME}:/bin/bash\n" for name, uid in UIDS.items()),
    "group": "".join(f"{name}:x:{uid}:\n" for name, uid in UIDS.items()),
    "hosts": "127.0.0.1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
HOST_ETC = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/ssl/certs")
"""All that a dynamic linker and Debian's alternatives need; nothing else of the host's /etc is visible."""
HIDDEN = ("kcore", "keys", "latency_stats", "timer_list", "timer_stats", "sched_debug", "kmsg", "kallsyms", "modules")
"""Files of /proc that tell about the host, as in Docker."""

# $1 is the fd that tells the host that the command starts now, $2 the most processes or "". The forwarder reports on a
# FIFO that it listens; the FIFO is drained afterwards because socat goes on reporting. A connection waits two minutes
# for a proxy that is being started again.
START = r"""
ready=$1; processes=$2; shift 2
if [ -n "$processes" ]; then ulimit -u "$processes"; fi
if [ -S /run/proxy.sock ]; then
  mkfifo /run/forwarder; exec 3<>/run/forwarder
  ( socat -d -d TCP-LISTEN:8080,bind=127.0.0.1,fork,reuseaddr \
    UNIX-CONNECT:/run/proxy.sock,retry=1200,interval=0.1 2>/run/forwarder & )
  while read -r line <&3; do
    case $line in *"listening on"*) break ;; *" E "*) echo "$line" >&2; exit 125 ;; esac
  done
  ( cat <&3 >/dev/null & )
  exec 3<&-
fi
echo ready >&"$ready"; exec {ready}>&-
exec "$@"
"""


class BubblewrapSandbox:
    """See `sandboxes.base.Sandbox`."""

    def __init__(self, spec: SandboxSpec, host: Host) -> None:
        self.spec = spec
        self.cgroups: list[Path] = []
        """Empty before `start`, and where no cgroup can be made."""
        self._host = host
        self._clock = host.clock
        self._number = next(_numbers)
        self._userns: int | None = None
        self._used = False
        self._running: set[ProcessTree] = set()
        host.uid(spec.user)

    async def start(self) -> None:
        spec = self.spec
        try:
            # Closed to other users: it holds the session's key, and the policy may make setuid files in it.
            spec.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            (spec.root / "etc").mkdir(exist_ok=True)
            for name, text in ETC.items():
                (spec.root / "etc" / name).write_text(text)
            spec.logs.mkdir(exist_ok=True)
            parts = [spec.logs / part for part in ("agent", "artifacts", "verifier")]
            for directory in (spec.workspace, spec.home, spec.tmp, *parts):
                directory.mkdir(exist_ok=True)
                self._host.own(directory, spec.user)
            self._host.share(spec.root)
            self.cgroups = self._host.cgroups.make(spec.limits)
        except OSError as error:
            raise SandboxError(f"sandbox {spec.name}: {error.filename}: {error.strerror}.") from error
        if self._host.ids:
            self._userns = await make_userns(self._host.ids)

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
        user: str | None = None,
        on_boot: Callable[[], None] | None = None,
    ) -> ExecResult:
        self._used = True
        uid = self._host.uid(user or self.spec.user)
        started = self._clock.now()
        drains: list[Drain] = []
        try:
            for path in dict.fromkeys((stdout, stderr)):
                drains.append(await Drain.open(path, self.spec.limits.output_mb))
            tree = await self._spawned(argv, uid, env or {}, stdin, drains[0].fd, drains[-1].fd)
        except OSError as error:
            raise SandboxError(f"sandbox {self.spec.name}: could not start {argv[0]}: {error.strerror}.") from error
        finally:
            for drain in drains:
                drain.close()
        self._running.add(tree)
        try:
            try:
                async with asyncio.timeout(boot_timeout_s):
                    booted = await tree.booted()
            except TimeoutError:
                raise SandboxError(f"sandbox {self.spec.name}: not booted within {boot_timeout_s:g} s.") from None
            if not booted:
                await self._ended(tree, drains)
                raise SandboxError(f"sandbox {self.spec.name}: could not boot: {tail(stderr) or 'no message'}")
            running = self._clock.now()
            if on_boot is not None:
                on_boot()
            code, exceeded = await self._waited(tree, timeout_s)
            return ExecResult(
                exit_code=code,
                timed_out=code is None and not exceeded,
                exceeded=exceeded,
                boot_s=running - started,
                seconds=self._clock.now() - running,
            )
        except asyncio.CancelledError:
            await asyncio.shield(tree.terminate(self._host.term_grace_s))
            raise
        finally:
            await self._ended(tree, drains)
            self._running.discard(tree)

    async def upload(self, source: Path, target: str) -> None:
        self._before_exec("upload", target)
        there = self._host_path(target)
        await copy(f"{source}/.", there)
        await self._give(there)

    async def write(self, target: str, content: str) -> None:
        self._before_exec("write", target)
        path = self._host_path(target)
        missing = [parent for parent in path.parents if not parent.exists()]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise SandboxError(f"sandbox {self.spec.name}: {target}: {error.strerror}.") from error
        await self._give(missing[-1] if missing else path)

    @property
    def has_users(self) -> bool:
        return self._host.has_users

    async def give(self, path: Path, user: str) -> None:
        self._before_exec("give", str(path))
        owner = self._host.owner(user)
        if owner is not None:
            await give(path, owner)

    async def restore(self, before: SandboxSpec) -> None:
        self._before_exec("restore", before.name)
        await copy(f"{before.workspace}/.", self.spec.workspace)

    async def download(self, source: str, target: Path) -> None:
        await copy(self._host_path(source), target)

    async def close(self, *, keep: bool) -> None:
        for tree in list(self._running):
            await tree.terminate(self._host.term_grace_s)
        for _ in range(BUSY_TRIES):
            self.cgroups = cgroups.remove(self.cgroups)
            if not self.cgroups:
                break
            await self._clock.sleep(BUSY_S)
        else:
            log.warning("sandbox %s: left to the next runner, still busy: %s", self.spec.name, self.cgroups)
            self.cgroups = []
        if self._userns is not None:
            os.close(self._userns)
            self._userns = None
        if not keep:
            await remove_tree(self.spec.root)

    def _before_exec(self, what: str, target: str) -> None:
        if self._used:
            raise SandboxError(f"sandbox {self.spec.name}: {what} to {target} after an exec; {what} before it.")

    async def _give(self, path: Path) -> None:
        owner = self._host.owner(self.spec.user)
        if owner is not None:
            await give(path, owner)

    async def _waited(self, tree: ProcessTree, timeout_s: float) -> tuple[int | None, str]:
        """The exit code, or None and the limit that was passed; "" when it was the time."""
        waiting = asyncio.ensure_future(tree.wait())
        try:
            async with self._host.watchdog.watch(self.spec.root, lambda: tree.init_pid, self.spec.limits) as exceeded:
                futures: set[asyncio.Future[int] | asyncio.Future[str]] = {waiting, exceeded}
                await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if waiting.done():
                    return waiting.result(), ""
                reason = exceeded.result() if exceeded.done() else ""
                await tree.terminate(self._host.term_grace_s)
                return None, reason
        finally:
            waiting.cancel()

    async def _ended(self, tree: ProcessTree, drains: Sequence[Drain]) -> None:
        """Returns when no process is left and all output is in its file, also when it is cancelled meanwhile."""

        async def end() -> None:
            await tree.kill()
            for drain in drains:
                await drain.finish()

        await asyncio.shield(asyncio.ensure_future(end()))

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

    def _staged(self) -> dict[Path, str]:
        """Where bubblewrap finds the host paths that are not everybody's."""
        spec = self.spec
        sources = [spec.root, *(mount.source for mount in spec.mounts)]
        return self._host.staged([*sources, *([spec.proxy_socket.parent] if spec.proxy_socket else [])])

    def _arguments(self, uid: int, staged: Mapping[Path, str]) -> list[str]:
        spec, root = self.spec, staged[self.spec.root]
        arguments = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        if self._userns is not None:
            # Root inside is entered before bubblewrap starts (`Host.command`): it changes only to other ids.
            arguments += ["--userns", str(self._userns)] if uid != ROOT else []
            arguments += ["--assert-userns-disabled"]
            # bubblewrap leaves that descriptor open in what it starts, and closes the one of --block-fd.
            arguments += ["--block-fd", str(self._userns)]
        else:
            arguments += ["--unshare-user", "--disable-userns"]
        arguments += ["--cap-drop", "ALL"]
        if uid == ROOT:
            arguments += [part for name in CAPABILITIES for part in ("--cap-add", f"CAP_{name}")]
        if uid != ROOT:
            arguments += ["--uid", str(uid), "--gid", str(uid)]
        arguments += ["--hostname", "sandbox", "--die-with-parent"]
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
            arguments += ["--ro-bind", f"{root}/etc/{name}", f"/etc/{name}"]
        arguments += PROC
        arguments += ["--dev", "/dev", "--size", str(spec.limits.shm_mb << 20), "--perms", "1777"]
        arguments += ["--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
        arguments += ["--size", str(RUN_MB << 20), "--tmpfs", "/run"]
        for inside, directory in self._writable().items():
            arguments += ["--bind", f"{root}/{directory.relative_to(spec.root)}", inside]
        for mount in spec.mounts:
            arguments += ["--ro-bind", staged[mount.source], mount.target]
        if spec.proxy_socket is not None:
            # The directory, so that the socket of a proxy worker that takes over is there too.
            arguments += ["--ro-bind", staged[spec.proxy_socket.parent], "/run/proxy"]
            arguments += ["--symlink", f"proxy/{spec.proxy_socket.name}", "/run/proxy.sock"]
        return [*arguments, "--remount-ro", "/", "--chdir", spec.workdir]

    async def _spawned(
        self,
        argv: Sequence[str],
        uid: int,
        env: Mapping[str, str],
        stdin: Path | None,
        stdout: int,
        stderr: int,
    ) -> ProcessTree:
        spawning = asyncio.ensure_future(self._spawn(argv, uid, env, stdin, stdout, stderr))
        try:
            return await asyncio.shield(spawning)
        except asyncio.CancelledError:
            # asyncio would end bubblewrap alone, and leave the child that it may have made.
            await (await spawning).kill()
            raise

    async def _spawn(
        self,
        argv: Sequence[str],
        uid: int,
        env: Mapping[str, str],
        stdin: Path | None,
        stdout: int,
        stderr: int,
    ) -> ProcessTree:
        host, limits = self._host, self.spec.limits
        full_env = {"PATH": SYSTEM_PATH, "HOME": HOME, "USER": "agent", "LANG": "C.UTF-8", **self.spec.env, **env}
        staged = self._staged()
        arguments = [*self._arguments(uid, staged), "--clearenv"]
        for name, value in full_env.items():
            arguments += ["--setenv", name, value]
        info_read, info_write = os.pipe()
        ready_read, ready_write = os.pipe()
        with contextlib.ExitStack() as files:

            def passed(descriptor: int) -> int:
                files.callback(os.close, descriptor)
                return descriptor

            try:
                given = [passed(info_write), passed(ready_write)]
                program = passed(open_program(pin_cpus=host.enforcement.cpus == "affinity"))
                # By a descriptor: the environment holds the session's key, and everybody may read a command line.
                listed = passed(_memfd([*arguments, "--info-fd", str(info_write), "--seccomp", str(program)]))
                given += [program, listed, *([self._userns] if self._userns is not None else [])]
                most = host.processes_inside(limits)
                enter = self._userns if uid == ROOT else None
                command = ["--args", str(listed), "--", "/bin/bash", "--noprofile", "--norc", "-c", START, "start"]
                command += [str(ready_write), "" if most is None else str(most), *argv]
                process = await asyncio.create_subprocess_exec(
                    *host.command(command, limits, self.cgroups, staged, self._number, enter),
                    stdin=files.enter_context(stdin.open("rb")) if stdin else asyncio.subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    env=host.environment(),
                    cwd="/",
                    pass_fds=given,
                    start_new_session=True,
                )
            except BaseException:
                os.close(info_read)
                os.close(ready_read)
                raise
        return ProcessTree(process, info_read, ready_read)


def _memfd(arguments: Sequence[str]) -> int:
    """A descriptor that reads arguments as bubblewrap's `--args` takes them. Raises SandboxError for one it cannot."""
    if any("\0" in argument for argument in arguments):
        raise SandboxError("a path or variable of a sandbox has a NUL character; remove it from the task or profile.")
    descriptor = os.memfd_create("arguments")
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(b"".join(os.fsencode(argument) + b"\0" for argument in arguments))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


PROC = [
    *("--proc", "/proc"),
    *(part for name in HIDDEN if Path("/proc", name).exists() for part in ("--ro-bind", "/dev/null", f"/proc/{name}")),
    *("--remount-ro", "/proc"),
]
