"""A harness profile: how to install, check, start and recognise one harness (docs/harnesses.md).

Profiles are the TOML files in `profiles/`. Their texts are `string.Template`s: `${name}` is replaced, `$$` is a `$`.
A profile with `variant_of` is another one with some keys changed: another API of the same program, or another version.
"""

import tomllib
from pathlib import Path, PurePosixPath
from string import Template
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gyre.core.config import decode, require_environment
from gyre.core.errors import ConfigError
from gyre.harnesses.window import WINDOW_VARIABLES
from gyre.trajectory.roles import RoleMarkers

PROFILES = Path(__file__).parent / "profiles"

PREFIX_VARIABLES = frozenset({"prefix", "arch"})
"""Known as soon as the harness is installed: its directory, and the processor as npm spells it."""
LAUNCH_VARIABLES = (
    PREFIX_VARIABLES | WINDOW_VARIABLES | {"base_url", "api_key", "instruction", "instruction_json", "home"}
)
"""Known when an execution starts."""


class Install(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: Literal["npm", "pypi"]
    package: str
    version: str
    pins: list[str] = []
    """Requirements that fix the versions of dependencies."""


class HarnessProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    variant_of: str = ""
    """Profile whose keys this one inherits, and whose installation it shares when the versions are equal. Tables are
    merged key by key; everything else is replaced."""
    dialect: Literal["anthropic", "responses", "chat"]
    install: Install
    binary: str
    """Path of the executable; missing means not installed."""
    version_command: Annotated[list[str], Meta(min_length=1)]
    """Prints the version, among other words, within `start_timeout_s`."""
    argv: Annotated[list[str], Meta(min_length=1)]
    env: dict[str, str] = {}
    files: dict[str, str] = {}
    """Path below HOME → content, written before the start."""
    stdin: str = ""
    """Text on standard input; the prompt belongs here when the harness reads it there (an argument holds 128 KiB)."""
    window_env: dict[str, str] = {}
    """More environment, when the policy's window is at least `window_min` tokens: smaller ones would leave nothing
    between this harness's first prompt and the reserve that it keeps, and it would compact at every turn."""
    window_min: int = 0
    policy_failures: list[str] = []
    """Texts at the end of the output of a harness that failed because of what the policy did (it filled its context),
    not because of an outage: such an execution is graded even when it changed nothing."""
    start_timeout_s: float = 60.0
    markers: RoleMarkers = RoleMarkers()
    canned_answers: dict[str, str] = {}
    """Model name that only auxiliary calls ask for → text that they are answered with."""


def profile_names() -> list[str]:
    return sorted(path.stem for path in PROFILES.glob("*.toml"))


def load_profile(name: str) -> HarnessProfile:
    """The shipped profile of that name, or the one in a file of your own: an absolute path that ends in .toml. Raises
    ConfigError for an unknown harness or a broken profile."""
    if name.endswith(".toml"):
        if not Path(name).is_absolute():
            raise ConfigError(f"harness {name!r}: give the absolute path of a profile, every process reads it.")
        return read_profile(Path(name))
    if name not in profile_names():
        raise ConfigError(f"harness {name!r} is unknown; there are {', '.join(profile_names())}, or a profile's path.")
    return read_profile(PROFILES / f"{name}.toml")


def read_profile(path: Path) -> HarnessProfile:
    """The profile in a file; its name is the file's. Raises ConfigError."""
    data = _data(path)
    if base := data.get("variant_of"):
        data = _merged(_data(path.parent / f"{base}.toml"), data)
    profile = decode({"name": path.stem, **data}, HarnessProfile, where=str(path), base=path.parent)
    _check_variables(profile, str(path))
    for field, variables in (("env", profile.env), ("window_env", profile.window_env)):
        require_environment(variables, f"{path}: {field}")
    for file in map(PurePosixPath, profile.files):
        if file.is_absolute() or ".." in file.parts:
            raise ConfigError(f"{path}: files: {file} is not below HOME; name it relative to HOME, without `..`.")
    return profile


def _data(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such profile (`variant_of` names one beside it).") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a profile.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    tables = {key: {**base[key], **value} for key, value in changes.items() if isinstance(value, dict) and key in base}
    return {**base, **changes, **tables}


def _check_variables(profile: HarnessProfile, where: str) -> None:
    early = {"binary": [profile.binary], "version_command": profile.version_command}
    late = {
        "argv": profile.argv,
        "env": list(profile.env.values()),
        "window_env": list(profile.window_env.values()),
        "files": list(profile.files.values()),
        "stdin": [profile.stdin],
    }
    for allowed, fields in ((PREFIX_VARIABLES, early), (LAUNCH_VARIABLES, late)):
        for field, texts in fields.items():
            for text in texts:
                template = Template(text)
                unknown = set(template.get_identifiers()) - allowed if template.is_valid() else {"a stray $"}
                if unknown:
                    names = ", ".join(f"${{{name}}}" for name in sorted(allowed))
                    raise ConfigError(f"{where}: {field}: {min(unknown)} is unknown; use {names}, or $$ for a dollar.")
