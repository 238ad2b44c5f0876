"""What a sandbox must do to start a harness for one execution: a pure function of profile, task and session."""

import json
import platform
from pathlib import Path
from string import Template

import msgspec

from gyre.core.errors import ConfigError
from gyre.core.records import SessionAccess
from gyre.harnesses.profile import HarnessProfile
from gyre.harnesses.window import ContextWindow

SANDBOX_PREFIX = "/opt/harness"
"""Where the installed harness is visible inside a sandbox."""

ARGUMENT_LIMIT = 128 * 1024
"""Linux: longest single argument, in bytes."""


class HarnessLaunch(msgspec.Struct, frozen=True, kw_only=True):
    argv: list[str]
    env: dict[str, str]
    files: dict[str, str]
    """Path below HOME → content."""
    stdin: str
    mounts: dict[str, Path]
    """Path inside → host path, read-only."""


def prepare(
    profile: HarnessProfile,
    prefix: Path,
    *,
    instruction: str,
    access: SessionAccess,
    proxy_url: str,
    home: str,
    window: ContextWindow,
) -> HarnessLaunch:
    """Raises ConfigError when the instruction does not fit the way in which this harness takes it."""
    values = {
        "prefix": SANDBOX_PREFIX,
        "arch": npm_arch(),
        "base_url": proxy_url + access.path,
        "api_key": access.api_key,
        "instruction": instruction,
        "instruction_json": json.dumps(instruction, ensure_ascii=False),
        "home": home,
        **window.variables(),
    }
    env = profile.env
    if window.max_context >= profile.window_min:
        env = {**env, **profile.window_env}

    def filled(text: str) -> str:
        return Template(text).substitute(values)

    argv = [filled(text) for text in profile.argv]
    if any(len(text.encode()) >= ARGUMENT_LIMIT for text in argv):
        raise ConfigError(f"harness {profile.name} takes the task as an argument, which holds 128 KiB; shorten it.")
    return HarnessLaunch(
        argv=argv,
        env={name: filled(text) for name, text in env.items()},
        files={path: filled(text) for path, text in profile.files.items()},
        stdin=filled(profile.stdin),
        mounts={SANDBOX_PREFIX: prefix.resolve(), **_interpreter(prefix)},
    )


def npm_arch() -> str:
    return {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def _interpreter(prefix: Path) -> dict[str, Path]:
    """A venv's base interpreter, when it is not part of the system that every sandbox sees."""
    settings = prefix / "pyvenv.cfg"
    if not settings.is_file():
        return {}
    pairs = (line.partition("=") for line in settings.read_text().splitlines())
    home = next(value.strip() for key, _, value in pairs if key.strip() == "home")
    base = Path(home).parent
    return {} if base.is_relative_to("/usr") else {str(base): base.resolve()}
