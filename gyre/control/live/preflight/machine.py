"""What the run needs of this machine: sandboxes, a free port, the interpreter of SGLang."""

import socket

from gyre.control.live.config import RunConfig
from gyre.core.errors import ConfigError
from gyre.core.programs import first_line
from gyre.engines.section import SglangSection
from gyre.launch.local import LOOPBACK
from gyre.launch.section import HereSection
from gyre.sandboxes.probe import check_bwrap, check_namespaces, check_socat


def check_sandboxes(config: RunConfig) -> None:  # noqa: ARG001
    """Whether a sandbox with its proxy socket starts."""
    for sandboxes_need in (check_bwrap, check_namespaces, check_socat):
        if not (found := sandboxes_need()).ok:
            raise ConfigError(f"sandboxes cannot start: {found.name}: {found.found}; {found.advice}")


def check_engine(config: RunConfig) -> None:
    """Whether `engine.python`, which only SGLang engines run, is an interpreter that has SGLang."""
    if not isinstance(config.engine, SglangSection) or not isinstance(config.launch, HereSection):
        return
    python = config.engine.python
    if first_line(python, "-c", "from importlib.metadata import version; print(version('sglang'))") is None:
        raise ConfigError(
            f"engine.python = {python} is no interpreter that has SGLang; name the one of the environment "
            "that it is installed in"
        )


def check_port(config: RunConfig) -> None:
    """Whether the proxy can serve on the configured port."""
    if not config.rollout.port:
        return
    try:
        socket.create_server((LOOPBACK, config.rollout.port)).close()
    except OSError as error:
        raise ConfigError(
            f"rollout.port = {config.rollout.port} cannot be used on {LOOPBACK} ({error.strerror}); "
            "choose another one, or leave it out when only sandboxes need the proxy"
        ) from None
