"""The list of checks, in the order in which they run."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from gyre.control.live.config import RunConfig
from gyre.control.live.preflight import machine, model, settings
from gyre.core.errors import ConfigError
from gyre.harnesses import check as check_harness
from gyre.harnesses import load_profile
from gyre.tasks import load_tasks


class Check(NamedTuple):
    name: str
    run: Callable[[RunConfig], None]
    """Raises ConfigError with one sentence: what is wrong, where, what to do."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one check found."""

    check: str
    ok: bool
    problem: str = ""
    """One sentence when it is not ok."""


def _tasks(config: RunConfig) -> None:
    load_tasks(config.tasks.root)


def _harness(config: RunConfig) -> None:
    check_harness(load_profile(config.harness.name), config.harness.root)


CHECKS: Sequence[Check] = (
    Check("settings", settings.check),
    Check("model", model.check),
    Check("tokenizer", model.check_renderer),
    Check("tasks", _tasks),
    Check("harness", _harness),
    Check("engine", machine.check_engine),
    Check("sandbox", machine.check_sandboxes),
    Check("port", machine.check_port),
)


def preflight(config: RunConfig, where: str) -> None:
    """Runs the checks up to the first that fails. Raises ConfigError of one sentence that names `where`."""
    for check in CHECKS:
        _run(check, config, where)


def findings(config: RunConfig, where: str) -> list[Finding]:
    """Runs every check, whatever the others found."""
    found = []
    for check in CHECKS:
        try:
            _run(check, config, where)
        except ConfigError as error:
            found.append(Finding(check=check.name, ok=False, problem=str(error)))
        else:
            found.append(Finding(check=check.name, ok=True))
    return found


def _run(check: Check, config: RunConfig, where: str) -> None:
    try:
        check.run(config)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
