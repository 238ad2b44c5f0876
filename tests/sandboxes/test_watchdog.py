"""What the kernel does not enforce here, a watchdog does."""

import asyncio
import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gyre.sandboxes.config import SandboxLimits
from gyre.sandboxes.limits.cgroups import Cgroups
from gyre.sandboxes.limits.enforcement import Enforcement, enforcement
from gyre.sandboxes.limits.watchdog import Use, Watchdog, beyond

LIMITS = SandboxLimits(memory_mb=100, processes=10, disk_mb=5, files=20)


numbers = st.integers(0, 10**6)
uses = st.builds(Use, memory_mb=st.floats(0, 1e6), processes=numbers, disk_mb=st.floats(0, 1e6), files=numbers)


@given(uses)
def test_a_limit_is_passed_exactly_when_more_is_used(use: Use) -> None:
    within = use.memory_mb <= 100 and use.processes <= 10 and use.disk_mb <= 5 and use.files <= 20
    assert (beyond(use, LIMITS) == "") == within


async def reason(tmp_path: Path, limits: SandboxLimits, weak: Enforcement, init: int | None = None) -> str:
    watchdog = Watchdog(weak, period_s=0.01)
    async with watchdog.watch(tmp_path, lambda: init, limits) as exceeded, asyncio.timeout(60):
        return await exceeded


async def test_bytes_and_files_are_counted(tmp_path: Path) -> None:
    strong = Enforcement(memory="cgroup v2", processes="cgroup v2", cpus="cgroup v2")
    (tmp_path / "big").write_bytes(os.urandom(6 << 20))
    assert "sandbox.limits.disk_mb = 5" in await reason(tmp_path, LIMITS, strong)
    (tmp_path / "big").unlink()
    (tmp_path / "many").mkdir()
    for n in range(30):
        (tmp_path / "many" / str(n)).touch()
    assert "sandbox.limits.files = 20" in await reason(tmp_path, LIMITS, strong)


async def test_memory_and_processes_of_a_tree_are_counted_where_no_cgroup_does(tmp_path: Path) -> None:
    none = enforcement(Cgroups(), "5.10.0")
    holds = "x = bytearray(120 << 20); print('held', flush=True); input()"
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", f'python3 -c "{holds}"; true', stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"held\n"
        assert "memory_mb = 100" in await reason(tmp_path, LIMITS, none, process.pid)
        few = SandboxLimits(processes=1, memory_mb=4000)
        assert "processes = 1" in await reason(tmp_path, few, none, process.pid)
    finally:
        process.stdin.close()
        await process.wait()
