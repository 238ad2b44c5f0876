"""Cgroups of sandboxes, in directories that play the hierarchies; the kernel's own is in test_bubblewrap.py."""

import os
from pathlib import Path

import pytest

from gyre.sandboxes.config import SandboxLimits
from gyre.sandboxes.limits import cgroups
from gyre.sandboxes.limits.cgroups import MAIN, Cgroups, Mounted
from gyre.sandboxes.limits.enforcement import enforcement


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cgroup's directory goes with its files."""
    plain = Path.rmdir

    def rmdir(path: Path) -> None:
        for file in path.iterdir():
            file.unlink()
        plain(path)

    monkeypatch.setattr(Path, "rmdir", rmdir)


LIMITS = SandboxLimits(memory_mb=64, processes=20, cpus=1.5)


def hierarchy(tmp_path: Path, cgroup: str, mountinfo: str) -> Path:
    proc = tmp_path / "self"
    proc.mkdir()
    (proc / "cgroup").write_text(cgroup)
    (proc / "mountinfo").write_text(mountinfo)
    return proc


def v2(tmp_path: Path, *, enabled: str, available: str = "cpu memory pids io") -> tuple[Path, Path]:
    """`/proc/self` and our cgroup, in a cgroup v2 mounted at `tmp_path/cg`."""
    own = tmp_path / "cg/user.slice/own"
    own.mkdir(parents=True)
    (own / "cgroup.subtree_control").write_text(enabled)
    (own / "cgroup.controllers").write_text(available)
    (own / "cgroup.procs").write_text("")
    line = f"30 20 0:26 / {tmp_path / 'cg'} rw,nosuid - cgroup2 cgroup2 rw\n"
    return hierarchy(tmp_path, "0::/user.slice/own\n", line), own


def test_v1_has_a_directory_for_each_controller(tmp_path: Path) -> None:
    lines = ""
    for n, (name, options) in enumerate((("memory", "memory"), ("pids", "pids"), ("cpu,cpuacct", "cpu,cpuacct"))):
        (tmp_path / name / "a").mkdir(parents=True)
        lines += f"{n} 20 0:2{n} / {tmp_path / name} rw,nosuid - cgroup cgroup rw,{options}\n"
    proc = hierarchy(tmp_path, "3:cpu,cpuacct:/a\n2:pids:/a\n1:memory:/a\n0::/\n", lines)
    found = cgroups.find(proc, systemd=False)
    assert found.enforced == {"memory", "pids", "cpu"}
    made = found.make(LIMITS)
    texts = {file.name: file.read_text() for cgroup in made for file in cgroup.iterdir()}
    assert texts == {
        "memory.limit_in_bytes": str(64 << 20),
        "pids.max": "20",
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "150000",
    }
    assert {cgroup.parent for cgroup in made} == {tmp_path / name / "a" for name in ("memory", "pids", "cpu,cpuacct")}
    assert enforcement(found).weak == []


def test_v2_has_one_directory_with_all_limits(tmp_path: Path) -> None:
    proc, own = v2(tmp_path, enabled="memory pids cpu")
    found = cgroups.find(proc, systemd=False)
    (made,) = found.make(LIMITS)
    texts = {file.name: file.read_text() for file in made.iterdir()}
    assert texts == {"memory.max": str(64 << 20), "pids.max": "20", "cpu.max": "150000 100000"}
    assert made.parent == own


def test_v2_turns_its_controllers_on_for_its_children(tmp_path: Path) -> None:
    proc, own = v2(tmp_path, enabled="")
    found = cgroups.find(proc, systemd=False)
    # The kernel would say "cpu memory pids" now; a plain file says what was written.
    assert (own / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    assert found.parents == {}


def test_v2_moves_its_processes_to_a_leaf_when_the_kernel_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc, own = v2(tmp_path, enabled="")
    (own / "cgroup.procs").write_text("11\n12\n")
    moved: list[str] = []
    plain = Path.write_text

    def write(path: Path, text: str, *args: object, **options: object) -> int:
        if path == own / MAIN / "cgroup.procs":
            moved.append(text)
        if path == own / "cgroup.subtree_control":
            if len(moved) < 2:
                raise OSError(16, "busy")
            text = text.replace("+", "")
        return plain(path, text)

    monkeypatch.setattr(Path, "write_text", write)
    found = cgroups.find(proc, systemd=False)
    assert moved == ["11", "12"]
    assert found.enforced == {"memory", "pids", "cpu"}
    assert set(found.parents.values()) == {Mounted(own, True)}


def test_a_process_of_the_leaf_makes_cgroups_beside_it(tmp_path: Path) -> None:
    proc, own = v2(tmp_path, enabled="memory pids cpu")
    (own / MAIN).mkdir()
    (proc / "cgroup").write_text(f"0::/user.slice/own/{MAIN}\n")
    assert set(cgroups.find(proc, systemd=False).parents.values()) == {Mounted(own, True)}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cgroup_that_is_not_delegated_gives_nothing(tmp_path: Path) -> None:
    proc, own = v2(tmp_path, enabled="memory pids cpu")
    own.chmod(0o555)
    assert cgroups.find(proc, systemd=False).enforced == frozenset()


def test_a_controller_that_is_missing_is_told_and_the_others_hold(tmp_path: Path) -> None:
    proc, _ = v2(tmp_path, enabled="pids cpu", available="pids cpu")
    found = cgroups.find(proc, systemd=False)
    assert found.enforced == {"pids", "cpu"}
    assert enforcement(found).weak == ["memory"]


def test_without_any_cgroup_only_memory_is_weak_on_a_kernel_of_today() -> None:
    now, before = enforcement(Cgroups(), "6.1.0-13-amd64"), enforcement(Cgroups(), "5.10.0")
    assert (now.processes, now.cpus, now.weak) == ("rlimit", "affinity", ["memory"])
    assert before.weak == ["memory", "processes"]


def test_systemd_is_told_every_limit() -> None:
    command = Cgroups(systemd=("systemd-run", "--scope")).scope(LIMITS)
    assert command[-1] == "--"
    assert {"MemoryMax=64M", "MemorySwapMax=0", "TasksMax=20", "CPUQuota=150%"} <= set(command)
    assert Cgroups().scope(LIMITS) == []


def test_a_runner_that_starts_leaves_the_empty_cgroups_of_a_live_one(tmp_path: Path) -> None:
    live, own, dead, leaf = (
        tmp_path / name for name in (f"gyre-{os.getppid()}-0", f"gyre-{os.getpid()}-0", f"gyre-{2**22 + 1}-0", MAIN)
    )
    for cgroup in (live, own, dead, leaf):
        cgroup.mkdir()
    cgroups.sweep(Cgroups(parents={"pids": Mounted(tmp_path, True)}))
    assert [cgroup.exists() for cgroup in (live, own, dead, leaf)] == [True, False, False, True]
