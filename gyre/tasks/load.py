"""Reads task directories (docs/tasks.md): task.toml, instruction.md, environment/, tests/test.sh, solution/.

Format: that of Harbor 0.26 (schema 1.x). There is no image here: a Dockerfile is ignored when the task brings its
initial files in environment/workspace/, and a task that needs its image is refused. The network is always off.
"""

import math
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import msgspec

from gyre.core.config import require_environment
from gyre.core.errors import ConfigError, TaskError
from gyre.core.system.paths import HOME
from gyre.tasks.task import Task, TaskLimits

T = TypeVar("T")

RESERVED_DIRECTORIES = ("/usr", "/bin", "/lib", "/lib64", "/etc", "/proc", "/dev", "/run", "/tests", "/logs", "/opt")
"""What a sandbox mounts itself; a work directory cannot lie there."""
MOST_MB = 2**24
"""16 TiB: more than any machine has; a limit beyond it is a mistake of units."""


def load_task(path: str | Path) -> Task:
    """Raises TaskError that names the directory and the broken part."""
    directory = Path(path).absolute()
    if not directory.is_dir():
        raise TaskError(f"{directory}: there is no such task directory; check the path in the config.")
    raw = _manifest(directory)
    for part, why in (("tests/test.sh", "it grades the workspace"), ("instruction.md", "it is the prompt")):
        if not (directory / part).is_file():
            raise TaskError(f"{directory}: {part} is missing; {why}.")
    try:
        instruction = (directory / "instruction.md").read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        raise TaskError(f"{directory}: instruction.md is not UTF-8 text; save it as UTF-8.") from None
    if not instruction:
        raise TaskError(f"{directory}: instruction.md is empty; it is the prompt.")
    _refuse_unsupported(directory, raw)
    field = _Fields(directory, raw)
    workdir = _workdir(directory, field.get("environment.workdir", str) or "/app")
    env, verifier_env = (field.get(f"{section}.env", dict[str, str]) or {} for section in ("environment", "verifier"))
    for section, variables in (("environment", env), ("verifier", verifier_env)):
        try:
            require_environment(variables, f"{directory}: task.toml: {section}.env")
        except ConfigError as error:
            raise TaskError(str(error)) from None
    return Task(
        name=directory.name,
        path=directory,
        instruction=instruction,
        workdir=workdir,
        env=env,
        verifier_env=verifier_env,
        agent_timeout_s=field.positive("agent.timeout_sec"),
        verifier_timeout_s=field.positive("verifier.timeout_sec"),
        limits=TaskLimits(
            cpus=field.positive("environment.cpus"),
            memory_mb=field.megabytes("environment.memory_mb"),
            storage_mb=field.megabytes("environment.storage_mb"),
        ),
        verifier_user=_verifier_user(directory, field.get("verifier.user", str)),
        reward_range=_reward_range(directory, field.get("verifier.reward_range", tuple[float, float])),
        raw=raw,
    )


def load_tasks(root: str | Path) -> list[Task]:
    """Every directory under `root` (one level) that holds a task.toml, by name. Raises TaskError when there is none."""
    directory = Path(root).absolute()
    if not directory.is_dir():
        raise TaskError(f"{directory}: there is no such directory of tasks; check the path in the config.")
    found = [load_task(manifest.parent) for manifest in sorted(directory.glob("*/task.toml"))]
    if not found:
        raise TaskError(f"{directory}: no task directory (one with a task.toml) in it; check the path in the config.")
    return found


def _manifest(directory: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((directory / "task.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TaskError(f"{directory}: task.toml is missing; a task directory has one.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"{directory}: task.toml is not valid TOML: {error}.") from None


def _refuse_unsupported(directory: Path, raw: dict[str, Any]) -> None:
    if raw.get("steps") or (directory / "steps").is_dir():
        raise TaskError(f"{directory}: steps: tasks of several steps are not supported; use single-step tasks.")
    environment = directory / "environment"
    if (environment / "workspace").is_dir():
        return
    section = raw.get("environment")
    image = section.get("docker_image") if isinstance(section, dict) else None
    parts = [f"environment/{name}" for name in ("Dockerfile", "docker-compose.yaml") if (environment / name).is_file()]
    if image or parts:
        part = parts[0] if parts else "task.toml: environment.docker_image"
        raise TaskError(
            f"{directory}: {part}: the task needs a container image, which the bubblewrap sandbox does not have; "
            "put its initial files in environment/workspace/."
        )


def _verifier_user(directory: Path, user: str | None) -> str:
    if user not in (None, "root", "agent"):
        raise TaskError(f'{directory}: task.toml: verifier.user is {user!r}; a grader runs as "root" or "agent".')
    return user or "root"


def _reward_range(directory: Path, bounds: tuple[float, float] | None) -> tuple[float, float]:
    low, high = bounds or (0.0, 1.0)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise TaskError(
            f"{directory}: task.toml: verifier.reward_range is [{low}, {high}]; give the lowest and the highest reward."
        )
    return low, high


def _workdir(directory: Path, workdir: str) -> str:
    path = PurePosixPath(workdir)
    inside_reserved = any(path.is_relative_to(reserved) for reserved in RESERVED_DIRECTORIES)
    if not path.is_absolute() or ".." in path.parts or path == PurePosixPath("/") or inside_reserved:
        raise TaskError(
            f"{directory}: task.toml: environment.workdir is {workdir!r}; use an absolute directory such as /app, "
            f"outside {', '.join(RESERVED_DIRECTORIES)}."
        )
    if PurePosixPath(HOME).is_relative_to(path):
        raise TaskError(
            f"{directory}: task.toml: environment.workdir is {workdir!r}, which hides the harness's {HOME}."
        )
    return str(path)


class _Fields:
    def __init__(self, directory: Path, raw: dict[str, Any]) -> None:
        self._directory = directory
        self._raw = raw

    def get(self, name: str, kind: type[T]) -> T | None:
        section, key = name.split(".")
        table = self._raw.get(section, {})
        value = table.get(key) if isinstance(table, dict) else table
        if value is None:
            return None
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise TaskError(f"{self._directory}: task.toml: {name}: {error}.") from None

    def positive(self, name: str) -> float | None:
        value = self.get(name, float)
        if value is not None and not 0 < value < float("inf"):
            raise TaskError(f"{self._directory}: task.toml: {name} is {value}; it must be positive.")
        return value

    def megabytes(self, name: str) -> int | None:
        value = self.get(name, int)
        if value is not None and not 1 <= value <= MOST_MB:
            raise TaskError(f"{self._directory}: task.toml: {name} is {value}; it must be from 1 to {MOST_MB} (MiB).")
        return value
