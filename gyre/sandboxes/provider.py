"""The sandbox provider that a configuration names."""

from gyre.core.clock import Clock
from gyre.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from gyre.sandboxes.bubblewrap import BubblewrapSandbox
from gyre.sandboxes.config import SandboxSection
from gyre.sandboxes.host import Host


class BubblewrapProvider:
    """Namespaces of this machine. See `sandboxes.base.SandboxProvider`; raises ConfigError as `Host` does."""

    def __init__(
        self, section: SandboxSection | None = None, *, bwrap: str = "bwrap", clock: Clock | None = None
    ) -> None:
        self.host = Host(section or SandboxSection(), bwrap=bwrap, clock=clock)
        self.enforcement = self.host.enforcement

    def create(self, spec: SandboxSpec) -> Sandbox:
        return BubblewrapSandbox(spec, self.host)

    async def close(self) -> None: ...


def open_provider(section: SandboxSection, *, clock: Clock | None = None) -> SandboxProvider:
    """Raises ConfigError when this machine cannot run sandboxes of that kind, or lacks a limit that is required."""
    return BubblewrapProvider(section, clock=clock)
