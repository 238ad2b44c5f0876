"""`gyre setup` and `gyre demo`: everything that the main job needs, installed where it is missing."""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gyre.core.errors import ConfigError
from gyre.core.places import carried
from gyre.harnesses import install, profile_names

SYSTEM = {"bwrap": "bubblewrap", "socat": "socat"}
"""Program → Debian package."""
SECCOMP = "libseccomp2"
TRAINING = {"torch": "torch", "megatron.core": "megatron-core"}
"""Module → distribution of the training stack, which the core of Gyre does without."""
DEMO_HARNESS = "claude_code"


def setup(harnesses: Sequence[str], *, system: bool) -> int:
    """Installs harnesses, `all` for every profile; before that, with `system`, what sandboxes need of the system.
    Raises ConfigError."""
    if system:
        install_system()
    for name in profile_names() if list(harnesses) == ["all"] else harnesses:
        install(str(Path(name).absolute()) if name.endswith(".toml") else name)
    return 0


def demo(overrides: Sequence[str], directory: Path | None) -> int:
    """The main job, in any directory. Raises ConfigError when something is missing that cannot be installed."""
    install_system()
    install_training()
    install(DEMO_HARNESS)
    from gyre.cli.commands.train import train  # needs what was just installed

    return train(carried("examples") / "quickstart.toml", overrides, directory, None)


def install_system() -> None:
    """Raises ConfigError when programs of the system are missing and cannot be installed here."""
    if shutil.which("npm") is None:
        raise ConfigError("there is no npm: install Node.js 20 or newer, harnesses come from the npm registry")
    missing = [package for program, package in SYSTEM.items() if shutil.which(program) is None]
    if not _library("libseccomp.so.2"):
        missing.append(SECCOMP)
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise ConfigError(f"{', '.join(missing)} are missing, and there is no apt-get: install them by other means")
    if os.geteuid() != 0:
        raise ConfigError(f"{', '.join(missing)} are missing: apt-get install {' '.join(missing)}")
    print(f"Installing {', '.join(missing)}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", *missing]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"apt-get could not install {' '.join(missing)}: {done.stderr.strip()[-300:]}")


def install_training() -> None:
    """Installs the pinned training stack where it is missing, into a virtual environment only. Raises ConfigError."""
    wanted = [distribution for module, distribution in TRAINING.items() if not _importable(module)]
    if not wanted:
        return
    pins = (carried("requirements") / "cpu.txt").read_text().splitlines()
    packages = [pin for pin in pins if pin.partition("==")[0] in wanted]
    if sys.prefix == sys.base_prefix:
        raise ConfigError(
            f"{', '.join(wanted)} are missing and this Python is no virtual environment: make one "
            "(python3 -m venv .venv) and install gyre-rl[train] there"
        )
    print(f"Installing {', '.join(packages)} into {sys.prefix} (some minutes)", flush=True)
    done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", *packages], check=False)
    if done.returncode:
        raise ConfigError(f"pip could not install {' '.join(packages)}: see above")
    importlib.invalidate_caches()


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of its parent
        return False


def _library(name: str) -> bool:
    """Whether the dynamic linker finds it."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
