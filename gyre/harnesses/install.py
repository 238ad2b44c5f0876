"""Installs a harness at its pinned version below a root directory, and checks that it is there."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from string import Template

from gyre.core.errors import ConfigError
from gyre.core.places import cache_root
from gyre.harnesses.launch import npm_arch
from gyre.harnesses.profile import HarnessProfile, load_profile, profile_names

INSTALL_TIMEOUT_S = 900.0


def default_root() -> Path:
    """`harnesses` in the cache (`gyre.core.places`)."""
    return cache_root() / "harnesses"


def prefix_of(profile: HarnessProfile, root: Path | None = None) -> Path:
    return (root or default_root()) / f"{profile.variant_of or profile.name}-{profile.install.version}"


def install(name: str, root: Path | None = None) -> Path:
    """Installs from the package registry unless it is there already; returns the prefix. Raises ConfigError."""
    profile = load_profile(name)
    prefix = prefix_of(profile, root)
    if not prefix.exists():
        print(f"Installing {profile.install.package} {profile.install.version} into {prefix}", flush=True)
        prefix.parent.mkdir(parents=True, exist_ok=True)
        # Built aside and renamed, so that an interrupted installation is never taken for a finished one.
        building = Path(tempfile.mkdtemp(prefix=f".{prefix.name}-", dir=prefix.parent))
        try:
            building.chmod(0o755)
            for command in _commands(profile, building):
                _run(profile, command)
            building.rename(prefix)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    check(profile, root)
    return prefix


def check(profile: HarnessProfile, root: Path | None = None) -> None:
    """Raises ConfigError when the harness is missing below `root` or is of another version."""
    prefix = prefix_of(profile, root)
    values = {"prefix": str(prefix), "arch": npm_arch()}
    known = profile.name in profile_names()
    again = f"run: gyre setup {profile.name if known else f'/path/of/{profile.name}.toml'}"
    binary = Path(Template(profile.binary).substitute(values))
    if not os.access(binary, os.X_OK):
        raise ConfigError(f"harness {profile.name} {profile.install.version} is not installed ({binary}); {again}.")
    command = [Template(text).substitute(values) for text in profile.version_command]
    with tempfile.TemporaryDirectory() as home:
        try:
            found = subprocess.run(
                command,
                env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": home},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=profile.start_timeout_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"harness {profile.name}: {binary} does not start ({error}); {again}.") from None
    if profile.install.version not in found.stdout.split():
        answer = (found.stdout or found.stderr).strip()[-200:] or f"nothing, exit code {found.returncode}"
        raise ConfigError(
            f"harness {profile.name}: {binary} is not version {profile.install.version} (it says: {answer}); "
            f"remove {prefix} and {again}."
        )


def _commands(profile: HarnessProfile, prefix: Path) -> list[list[str]]:
    wanted = profile.install
    if wanted.source == "npm":
        npm = shutil.which("npm")
        if npm is None:
            raise ConfigError(f"harness {profile.name} needs npm; install Node.js 20 or newer.")
        # No scripts: the native binary is a package of its own, a script would only copy it.
        flags = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
        return [[npm, "install", "--prefix", str(prefix), *flags, f"{wanted.package}@{wanted.version}", *wanted.pins]]
    # Our own pip installs into it, so that no ensurepip is needed (Debian packages it apart).
    pip = [sys.executable, "-m", "pip", "--python", str(prefix / "bin/python"), "--disable-pip-version-check"]
    return [
        [sys.executable, "-m", "venv", "--without-pip", str(prefix)],
        [*pip, "install", "-q", f"{wanted.package}=={wanted.version}", *wanted.pins],
    ]


def _run(profile: HarnessProfile, command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"harness {profile.name}: {command[0]} took longer than {INSTALL_TIMEOUT_S:g} s; check the network."
        ) from None
    if done.returncode:
        why = (done.stderr or done.stdout).strip()[-400:]
        raise ConfigError(f"harness {profile.name} could not be installed ({Path(command[0]).name}): {why}")
