"""The isolation that every execution relies on, checked from inside real sandboxes."""

import asyncio
import os
import shutil
import signal
import socket
import sys
import textwrap
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

from gyre.core.errors import ConfigError, SandboxError
from gyre.sandboxes import (
    PROXY_URL,
    BubblewrapProvider,
    ExecResult,
    Mount,
    Sandbox,
    SandboxLimits,
    SandboxSection,
    SandboxSpec,
)
from gyre.sandboxes.files import copy
from gyre.sandboxes.isolation.ids import of_this_machine
from gyre.sandboxes.limits.cgroups import Cgroups, find
from gyre.sandboxes.tree import ProcessTree

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a sandbox ids of its own")


class Shell:
    """Runs bash scripts in one sandbox and keeps what they print."""

    def __init__(self, sandbox: Sandbox, logs: Path) -> None:
        self.sandbox = sandbox
        self.out, self.err = logs / "out", logs / "err"

    async def run(self, script: str, *, timeout_s: float = 20.0, **options: Any) -> ExecResult:
        self.out.write_bytes(b"")
        self.err.write_bytes(b"")
        return await self.sandbox.exec(
            ["bash", "-c", textwrap.dedent(script)],
            stdout=self.out,
            stderr=self.err,
            timeout_s=timeout_s,
            boot_timeout_s=20.0,
            **options,
        )

    async def output(self, script: str, **options: Any) -> str:
        result = await self.run(script, **options)
        assert result.exit_code == 0, self.err.read_text()
        return self.out.read_text()


@pytest.fixture
async def shell_of(tmp_path: Path) -> Any:
    async def make(**changes: Any) -> Shell:
        spec = SandboxSpec(name="test", root=tmp_path / "root", **changes)
        sandbox = BubblewrapProvider(SandboxSection(term_grace_s=1.0)).create(spec)
        await sandbox.start()
        made.append(sandbox)
        return Shell(sandbox, tmp_path)

    made: list[Sandbox] = []
    yield make
    for sandbox in made:
        await sandbox.close(keep=True)


@pytest.fixture
def marker() -> str:
    """An argument by which the processes of one test are found on the host."""
    return f"marker-{uuid.uuid4().hex}"


def marked(marker: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if marker in (process.info["cmdline"] or []) and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


async def test_workspace_home_logs_and_tmp_are_kept(shell_of: Any) -> None:
    shell = await shell_of()
    await shell.run("pwd > where; echo h > ~/h; echo t > /tmp/t; echo a > /logs/artifacts/a")
    await shell.sandbox.close(keep=True)
    spec = shell.sandbox.spec
    assert (spec.workspace / "where").read_text() == "/app\n"
    for path in (spec.home / "h", spec.tmp / "t", spec.logs / "artifacts/a"):
        assert path.exists()
    await shell.sandbox.close(keep=False)
    assert not spec.root.exists()


async def test_exit_code_and_output_and_stdin(shell_of: Any, tmp_path: Path) -> None:
    shell = await shell_of()
    (tmp_path / "question").write_text("hello")
    result = await shell.run("cat; echo bad >&2; exit 7", stdin=tmp_path / "question")
    assert (result.exit_code, result.timed_out) == (7, False)
    assert (shell.out.read_text(), shell.err.read_text()) == ("hello", "bad\n")
    assert (await shell.run("kill -9 $$")).exit_code == 128 + 9


async def test_a_command_can_be_interrupted_though_its_runner_cannot(shell_of: Any) -> None:
    """Workers ignore SIGINT, and a program that inherits that ignores it too: Python, and whatever a task starts."""
    shell = await shell_of()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        result = await shell.run("kill -INT $$; echo not interrupted")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (result.exit_code, shell.out.read_text()) == (128 + 2, "")


async def test_nothing_of_the_host_environment_enters(shell_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    shell = await shell_of(env={"FROM_TASK": "1"})
    names = {line.split("=")[0] for line in (await shell.output("env", env={"MINE": "2"})).splitlines()}
    assert names == {"PATH", "HOME", "USER", "LANG", "FROM_TASK", "MINE", "PWD", "SHLVL", "_"}


async def test_host_files_are_invisible_and_the_system_is_read_only(shell_of: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    shell = await shell_of()
    seen = (await shell.output(f"ls / /home; ls -A /root /work {tmp_path} /etc/shadow 2>/dev/null; true")).split()
    assert set(seen) <= {
        "/:",
        "/home:",
        "agent",
        *("app", "bin", "dev", "etc", "home", "lib", "lib64", "logs", "proc", "run", "sbin", "tmp", "usr"),
    }
    denied = "for p in /usr/x /etc/x /x /bin/x /home/x /logs/x; do touch $p 2>/dev/null && echo $p; done; true"
    assert await shell.output(denied) == ""
    assert await shell.output("id -u; id -un") == "1000\nagent\n"
    assert "bwrap" in await shell.output("tr '\\0' ' ' < /proc/1/cmdline")


async def test_no_new_user_namespaces_and_no_inherited_descriptors(shell_of: Any) -> None:
    shell = await shell_of()
    assert await shell.output("unshare -U true 2>/dev/null && echo possible; true") == ""
    # 0–2, and the one that ls reads the directory with.
    assert len((await shell.output("ls /proc/self/fd")).split()) == 4


async def test_no_network_without_a_proxy(shell_of: Any) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    shell = await shell_of()
    probe = f"""
    for target in 127.0.0.1/{port} 127.0.0.1/8080 1.1.1.1/53; do
      (exec 3<>/dev/tcp/$target) 2>/dev/null && echo $target
    done
    getent hosts example.com
    grep -c : /proc/net/dev
    """
    assert await shell.output(probe) == "1\n"  # The loopback device alone.
    listener.close()


def socket_below(directory: Path) -> Path:
    """A path for a proxy's socket, in a directory of its own that everybody may enter."""
    (directory / "proxy").mkdir()
    (directory / "proxy").chmod(0o755)
    return directory / "proxy" / "p.sock"


async def test_the_proxy_socket_is_the_only_way_out(shell_of: Any, tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"proxy says " + await reader.readline())
        await writer.drain()
        writer.close()

    path = socket_below(tmp_path)
    outside = socket.create_server(("127.0.0.1", 0))
    async with await asyncio.start_unix_server(answer, path):
        path.chmod(0o666)
        shell = await shell_of(proxy_socket=path)
        address = PROXY_URL.removeprefix("http://").replace(":", "/")
        probe = f"""
        (exec 3<>/dev/tcp/127.0.0.1/{outside.getsockname()[1]}) 2>/dev/null && echo escaped
        for i in 1 2 3; do exec 3<>/dev/tcp/{address}; echo hello >&3; cat <&3; exec 3>&-; done
        """
        assert await shell.output(probe) == "proxy says hello\n" * 3
    outside.close()


async def test_a_sandbox_cannot_close_the_proxy_to_others(shell_of: Any, tmp_path: Path) -> None:
    path = socket_below(tmp_path)
    async with await asyncio.start_unix_server(lambda _, writer: writer.close(), path):
        path.chmod(0o666)
        shell = await shell_of(proxy_socket=path)
        assert (await shell.run("chmod 0 /run/proxy.sock")).exit_code
        assert path.stat().st_mode & 0o777 == 0o666


async def test_other_users_reach_neither_keys_nor_setuid_files(shell_of: Any, tmp_path: Path) -> None:
    shell = await shell_of()
    await shell.output("cp /bin/true . && chmod u+s true")
    root = (tmp_path / "root").stat()
    assert root.st_mode & 0o007 == 0
    assert root.st_mode & 0o070 == 0 or (os.geteuid() == 0 and root.st_gid > 60_000)


async def test_t34_daemons_die_with_the_command(shell_of: Any, marker: str) -> None:
    shell = await shell_of()
    daemon = f"mkfifo up; setsid -f bash -c 'trap : TERM; echo > up; sleep 99; true' {marker}; cat up"
    await shell.output(daemon)
    assert marked(marker) == []


async def test_t34_a_timeout_ends_even_what_ignores_sigterm(shell_of: Any, marker: str) -> None:
    shell = await shell_of()
    result = await shell.run(
        f"bash -c 'trap \"echo got TERM\" TERM; while :; do sleep 99; done' {marker}", timeout_s=2.0
    )
    assert (result.exit_code, result.timed_out) == (None, True)
    assert shell.out.read_text().startswith("got TERM")
    assert marked(marker) == []


async def test_t34_a_cancelled_exec_leaves_no_process(shell_of: Any, marker: str) -> None:
    shell = await shell_of()
    fifo = shell.sandbox.spec.workspace / "started"
    os.mkfifo(fifo)
    fifo.chmod(0o666)
    task = asyncio.create_task(shell.run(f"bash -c 'echo > started; sleep 99; true' {marker}"))
    await asyncio.to_thread(fifo.read_text)
    assert marked(marker)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert marked(marker) == []


async def test_t34_the_sandbox_dies_with_its_owner(tmp_path: Path, marker: str) -> None:
    """SIGKILL of the process that owns the sandbox, as of a runner."""
    owner = f"""
import asyncio
from pathlib import Path
from gyre.sandboxes import BubblewrapProvider, SandboxSpec
async def main():
    sandbox = BubblewrapProvider().create(SandboxSpec(name="owned", root=Path({str(tmp_path / "root")!r})))
    await sandbox.start()
    daemon = "setsid -f bash -c 'echo up; sleep 99; true' {marker}; sleep 99"
    await sandbox.exec(["bash", "-c", daemon], stdout=Path("/dev/stdout"), stderr=Path("/dev/null"), timeout_s=60,
        boot_timeout_s=10)
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", owner, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"up\n"
        inside = marked(marker)
        assert inside
    finally:
        process.kill()
        await process.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, inside, timeout=5)
    assert alive == []


async def test_t33_a_boot_that_hangs_is_bounded(tmp_path: Path, marker: str) -> None:
    hung, log = tmp_path / "bwrap", tmp_path / "log"
    # Nothing binds the child to its parent yet, as in the first moments of the real one.
    hung.write_text(f"#!/bin/sh\ntail -f {log} {marker} &\nexec tail -f {log} {marker}\n")
    hung.chmod(0o755)
    sandbox = BubblewrapProvider(bwrap=str(hung)).create(SandboxSpec(name="hung", root=tmp_path / "root"))
    await sandbox.start()
    log.touch()
    with pytest.raises(SandboxError, match="not booted within"):
        await sandbox.exec(["true"], stdout=log, stderr=log, timeout_s=20, boot_timeout_s=0.2)
    async with asyncio.timeout(10):
        while marked(marker):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_t34_a_boot_that_is_cancelled_leaves_neither_process_nor_descriptor(shell_of: Any, marker: str) -> None:
    shell = await shell_of()
    await shell.run("true")
    before = psutil.Process().num_fds()
    for turns in range(6):
        running = asyncio.create_task(shell.run(f"exec sleep 99 {marker}"))
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait({running})
    async with asyncio.timeout(10):
        while marked(marker):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert psutil.Process().num_fds() == before


async def test_a_boot_that_fails_says_why(tmp_path: Path) -> None:
    missing = Mount(source=tmp_path / "missing", target="/opt/x")
    sandbox = BubblewrapProvider().create(SandboxSpec(name="bad", root=tmp_path / "root", mounts=[missing]))
    await sandbox.start()
    log = tmp_path / "log"
    with pytest.raises(SandboxError, match=r"could not boot.*missing"):
        await sandbox.exec(["true"], stdout=log, stderr=log, timeout_s=20, boot_timeout_s=20)


def test_a_missing_bubblewrap_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="apt-get install bubblewrap"):
        BubblewrapProvider(bwrap="no-such-bwrap")


async def test_limits_of_every_process(shell_of: Any) -> None:
    shell = await shell_of(limits=SandboxLimits(file_mb=1, open_files=64))
    assert await shell.output("ulimit -n; ulimit -c") == "64\n0\n"
    assert (await shell.run("head -c 2000000 /dev/zero > big")).exit_code != 0
    assert (shell.sandbox.spec.workspace / "big").stat().st_size == 1 << 20


@pytest.mark.skipif(not {"memory", "pids"} <= find().enforced, reason="this machine lets us make no cgroup")
async def test_limits_of_the_whole_sandbox(shell_of: Any) -> None:
    shell = await shell_of(limits=SandboxLimits(memory_mb=64, processes=20))
    forks = "import os, time\nfor i in range(40):\n  if not os.fork(): time.sleep(9)"
    assert (await shell.run(f"python3 -c '{forks}'")).exit_code == 1
    assert "Resource temporarily unavailable" in shell.err.read_text()
    assert (await shell.run("python3 -c 'bytearray(200 << 20)'")).exit_code == 128 + 9
    assert await shell.output("echo still works") == "still works\n"
    made = shell.sandbox.cgroups
    assert made
    await shell.sandbox.close(keep=False)
    assert not any(cgroup.exists() for cgroup in made)


WRITE_EVERYTHING = """
import os
opened, tried = [], 0
for top in ("/proc", "/sys"):
    for directory, _, files in os.walk(top):
        for name in files:
            path = os.path.join(directory, name)
            if os.path.islink(path):
                continue
            tried += 1
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                opened.append(path)
            except OSError:
                pass
print(tried > 500, opened)
"""


@pytest.mark.parametrize("user", ["agent", pytest.param("grader", marks=as_root), pytest.param("root", marks=as_root)])
async def test_no_file_of_proc_and_sys_can_be_written(shell_of: Any, user: str) -> None:
    shell = await shell_of(user=user)
    assert await shell.output(f"exec python3 -c '{WRITE_EVERYTHING}'") == "True []\n"


@as_root
async def test_nothing_inside_is_root_of_the_host(shell_of: Any, marker: str) -> None:
    shell = await shell_of()
    fifo = shell.sandbox.spec.workspace / "started"
    os.mkfifo(fifo)
    fifo.chmod(0o666)
    running = asyncio.create_task(shell.run(f"bash -c 'echo > started; sleep 99; true' {marker}"))
    await asyncio.to_thread(fifo.read_text)
    inside = [process for process in marked(marker) if "bwrap" not in process.name()]
    used = of_this_machine()
    for process in inside:
        for uid in (*process.uids(), *process.gids()):
            assert used.first < uid < used.first + used.count
    running.cancel()
    await asyncio.wait({running})
    assert (shell.sandbox.spec.workspace / "started").lstat().st_uid == 0
    await shell.run("touch mine")
    assert (shell.sandbox.spec.workspace / "mine").lstat().st_uid == used.first + 1000


@as_root
async def test_a_grader_and_an_agent_are_out_of_each_others_reach(shell_of: Any) -> None:
    """Root inside starts both, as an evaluator may; one sandbox, one process tree."""
    shell = await shell_of()
    script = """
    mkdir -m 1777 /tmp/shared; cd /tmp/shared
    as() { setpriv --reuid $1 --regid $1 --clear-groups "${@:2}"; }
    as 1001 bash -c 'umask 077; echo 1 > reward; sleep 99' & grader=$!
    until [ -s reward ]; do :; done
    as 1000 bash -c "kill -9 $grader; echo 9 > reward; cat reward; cat /proc/$grader/environ; rm -f reward"
    kill -0 $grader && cat reward && id -u
    """
    assert await shell.output(script, user="root") == "1\n0\n"
    assert shell.err.read_text().count("ermi") == 5  # "Operation not permitted", "Permission denied"


async def test_system_calls_that_change_the_machine_are_denied(shell_of: Any) -> None:
    shell = await shell_of()
    seccomp = await shell.output("grep -E '^(Seccomp|NoNewPrivs|CapEff|CapBnd):' /proc/self/status")
    assert seccomp.split() == [
        "CapEff:",
        "0000000000000000",
        "CapBnd:",
        "0000000000000000",
        "NoNewPrivs:",
        "1",
        "Seccomp:",
        "2",
    ]


async def test_output_is_kept_up_to_its_limit_and_the_harness_lives_on(shell_of: Any) -> None:
    shell = await shell_of(limits=SandboxLimits(output_mb=1))
    assert (await shell.run("head -c 5000000 /dev/zero; echo last >&2; exit 3")).exit_code == 3
    kept = shell.out.read_bytes()
    assert kept[: 1 << 20] == bytes(1 << 20)
    assert b"3951424 more bytes were dropped" in kept[1 << 20 :]
    assert shell.err.read_text() == "last\n"


async def test_a_full_disk_ends_the_execution_and_says_why(shell_of: Any) -> None:
    shell = await shell_of(limits=SandboxLimits(disk_mb=20))
    result = await shell.run(
        "for i in 1 2 3 4 5; do head -c 8000000 /dev/urandom > f$i; done; sleep 99", timeout_s=90.0
    )
    assert (result.exit_code, result.timed_out) == (None, False)
    assert "sandbox.limits.disk_mb = 20" in result.exceeded


async def test_memory_files_are_bounded(shell_of: Any) -> None:
    shell = await shell_of(limits=SandboxLimits(shm_mb=2))
    for full in ("/dev/shm/x", "/run/x"):
        await shell.run(f"head -c 99000000 /dev/zero > {full}; ls -s --block-size=1M {full} | cut -d' ' -f1")
        assert int(shell.out.read_text()) <= 16
    assert (await shell.run("touch /dev/x")).exit_code != 0


async def test_without_a_cgroup_the_limits_still_hold(shell_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre.sandboxes.limits.cgroups.find", Cgroups)
    shell = await shell_of(limits=SandboxLimits(memory_mb=200, processes=40, cpus=1.0))
    assert not shell.sandbox.cgroups
    forks = "import os, time\nfor i in range(60):\n  if not os.fork(): time.sleep(9)"
    assert (await shell.run(f"python3 -c '{forks}'")).exit_code == 1
    assert "Resource temporarily unavailable" in shell.err.read_text()
    assert await shell.output("nproc") == "1\n"
    widen = "import os; os.sched_setaffinity(0, range(os.cpu_count()))"
    assert (await shell.run(f"python3 -c '{widen}'")).exit_code == 1
    assert (await shell.run("python3 -c 'bytearray(300 << 20)'")).exit_code == 1
    each = "import time; x = bytearray(90 << 20); time.sleep(99)"
    result = await shell.run(f"for i in 1 2 3 4; do python3 -c '{each}' & done; wait", timeout_s=90.0)
    assert "sandbox.limits.memory_mb = 200" in result.exceeded


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_than_root_gets_the_same_isolation(tmp_path: Path) -> None:
    script = f"""
import asyncio, os, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from gyre.sandboxes import BubblewrapProvider, SandboxLimits, SandboxSpec
async def main():
    provider = BubblewrapProvider()
    assert provider.host.ids is None
    root = Path({str(tmp_path)!r}) / "theirs"
    sandbox = provider.create(SandboxSpec(name="x", root=root / "box", limits=SandboxLimits(processes=30)))
    await sandbox.start()
    run = dict(stdout=root / "out", stderr=root / "err", timeout_s=60, boot_timeout_s=30)
    forks = "import os, time\\nfor i in range(60):\\n  if not os.fork(): time.sleep(9)"
    result = await sandbox.exec(["bash", "-c", f"id -u; echo -e '{{forks}}' > f; python3 f"], **run)
    print((root / "out").read_text(), result.exit_code, provider.enforcement.processes)
    print("unavailable" in (root / "err").read_text(), (root / "err").read_text()[-300:])
    await sandbox.close(keep=False)
asyncio.run(main())
"""
    for directory in (tmp_path, *tmp_path.parents[:3]):
        if directory.stat().st_uid == 0 and directory != Path("/tmp"):
            directory.chmod(0o755)
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 4242, 4242)
    process = await asyncio.create_subprocess_exec(
        *("setpriv", "--reuid", "4242", "--regid", "4242", "--clear-groups", sys.executable, "-c", script),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd="/",
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-2000:]
    assert out.decode().startswith("1000\n 1 rlimit\nTrue"), out.decode()


async def test_a_bubblewrap_that_is_killed_looks_like_its_command_killed() -> None:
    pipes = os.pipe(), os.pipe()
    process = await asyncio.create_subprocess_exec("sh", "-c", "kill -KILL $$")
    tree = ProcessTree(process, *(read for read, _ in pipes))
    assert await tree.wait() == 128 + signal.SIGKILL
    await tree.kill()
    for _, write in pipes:
        os.close(write)


async def test_a_copy_that_is_cancelled_as_it_ends_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = asyncio.Event()

    class Ended:
        async def communicate(self) -> None:
            started.set()
            await asyncio.Event().wait()

        def kill(self) -> None:
            raise ProcessLookupError

        async def wait(self) -> None: ...

    async def ended(*_: object, **__: object) -> Ended:
        return Ended()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", ended)
    copying = asyncio.create_task(copy(tmp_path, tmp_path / "there"))
    await started.wait()
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying


async def test_upload_and_download(shell_of: Any, tmp_path: Path) -> None:
    shell = await shell_of()
    (tmp_path / "seed/sub").mkdir(parents=True)
    (tmp_path / "seed/sub/a").write_text("a")
    await shell.sandbox.upload(tmp_path / "seed", "/app")
    await shell.run("cat sub/a > b; mkfifo pipe; ln -s /etc/passwd link; ln -s / out")
    await shell.sandbox.download("/app", tmp_path / "copy")
    assert (tmp_path / "copy/b").read_text() == "a"
    assert (tmp_path / "copy/link").is_symlink()
    await shell.sandbox.download("/app/b", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "a"
    with pytest.raises(SandboxError, match="leads out"):
        await shell.sandbox.download("/app/out/etc/hostname", tmp_path / "stolen")
    with pytest.raises(SandboxError, match="No such file"):
        await shell.sandbox.download("/app/nothing", tmp_path / "x")
    with pytest.raises(SandboxError, match="in no writable directory"):
        await shell.sandbox.download("/etc/passwd", tmp_path / "x")
    with pytest.raises(SandboxError, match="upload before"):
        await shell.sandbox.upload(tmp_path / "seed", "/app")
