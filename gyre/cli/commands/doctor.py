"""`gyre doctor`: what this machine has and lacks, a line each with what to do."""

import importlib
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

from rich.text import Text

from gyre import __version__
from gyre.cli.console import open_console
from gyre.core.errors import ConfigError
from gyre.core.places import DISTRIBUTION
from gyre.core.system.programs import Check, first_line
from gyre.harnesses import check, load_profile
from gyre.sandboxes.probe import check_bwrap, check_limits, check_namespaces, check_seccomp, check_socat

NODE_MAJOR = 20
OTHER_DISTRIBUTION = "gyre"
SHM_BYTES = 1 << 30


def doctor() -> int:
    """0 when everything is there, 1 otherwise. A check that cannot run is a finding, not a crash."""
    console = open_console()
    bad = 0
    for run in CHECKS:
        result = run()
        bad += not result.ok
        mark = Text("ok     ", "green") if result.ok else Text("missing", "red")
        console.print(Text.assemble(mark, f"  {result.name:<20} {result.found}"), soft_wrap=True)
        if not result.ok:
            console.print(f"         → {result.advice}", soft_wrap=True, highlight=False, markup=False)
    console.print(
        "Everything that the main job needs is here." if not bad else f"{bad} of {len(CHECKS)} checks failed."
    )
    return 1 if bad else 0


def check_python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("Python", sys.version_info >= (3, 11), version, "install Python 3.11 or newer")


def check_distribution() -> Check:
    """Whether only this project's package answers to the name `gyre`: PyPI has another one."""
    others = [d for d in distributions() if canonical(d.metadata["Name"]) == OTHER_DISTRIBUTION]
    if not others:
        return Check("package", True, f"{DISTRIBUTION} {__version__}, alone")
    return Check(
        "package",
        False,
        f"the distribution {OTHER_DISTRIBUTION} {others[0].version}, another project with the same import name and "
        "command, is installed beside this one",
        f"pip uninstall {OTHER_DISTRIBUTION} && pip install --force-reinstall --no-deps {DISTRIBUTION}",
    )


def canonical(name: str | None) -> str:
    """As PyPI compares names of distributions."""
    return re.sub(r"[-_.]+", "-", name or "").lower()


def check_node() -> Check:
    advice = f"install Node.js {NODE_MAJOR} or newer; Claude Code is installed with its npm"
    found = first_line("node", "--version")
    if found is None or not found.startswith("v"):
        return Check("Node.js", False, found or "not found", advice)
    return Check("Node.js", int(found[1:].split(".")[0]) >= NODE_MAJOR, found, advice)


def check_shm() -> Check:
    advice = "enlarge it (mount -o remount,size=2g /dev/shm; docker run --shm-size=2g): weights travel through it"
    shm = Path("/dev/shm")
    if not shm.is_dir() or not os.access(shm, os.W_OK):
        return Check("/dev/shm", False, "not writable", advice)
    free = shutil.disk_usage(shm).free
    return Check("/dev/shm", free >= SHM_BYTES, f"{free / 2**30:.1f} GiB free", advice)


def check_torch() -> Check:
    return _module("torch", "torch", "make setup in a checkout, or pip install 'gyre-rl[train]'")


def check_megatron() -> Check:
    return _module("Megatron-core", "megatron.core", "make setup in a checkout, or pip install 'gyre-rl[train]'")


def check_claude_code() -> Check:
    return _harness("claude_code")


def check_mini_swe_agent() -> Check:
    return _harness("mini_swe_agent")


CHECKS: tuple[Callable[[], Check], ...] = (
    check_python,
    check_distribution,
    check_node,
    check_bwrap,
    check_seccomp,
    check_socat,
    check_namespaces,
    check_limits,
    check_shm,
    check_torch,
    check_megatron,
    check_claude_code,
    check_mini_swe_agent,
)


def _module(name: str, module: str, advice: str) -> Check:
    try:
        with warnings.catch_warnings(action="ignore"):  # about accelerator libraries that a CPU machine lacks
            found = importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a shared library of the wheel is missing
        return Check(name, False, str(error), advice)
    return Check(name, True, str(getattr(found, "__version__", "imported")), advice)


def _harness(name: str) -> Check:
    profile = load_profile(name)
    try:
        check(profile)
    except ConfigError as error:
        return Check(name, False, str(error), f"gyre setup {name}")
    return Check(name, True, profile.install.version)
