"""[transport] of a run's configuration: how weights, and the KV of calls that move, travel between processes.

`kind` chooses. Every process opens its own transport: it publishes under a directory of its own and reads from anyone.
"""

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from gyre.core.errors import ConfigError

if TYPE_CHECKING:
    from gyre.transport.base import WeightTransport


class ShmSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="shm"):
    """Shared memory of one machine."""


class MooncakeSection(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="mooncake"
):
    """One-sided reads of the Mooncake Transfer Engine, between machines.

    Mooncake listens on every interface of the machine and serves whoever asks: use it in a
    trusted network or a network namespace only.
    """

    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = ""
    """Names of the RDMA devices, separated by commas; "" leaves the choice to Mooncake."""
    stall_s: Annotated[float, Meta(gt=0)] = 1.5
    """A publisher that completes no read and gives no sign of life for so long is lost."""
    deliver_s: Annotated[float, Meta(gt=0)] = 60.0
    """One that gives signs of life and completes no read for so long is lost as well."""


TransportSection = ShmSection | MooncakeSection


def require(section: TransportSection) -> None:
    """Raises ConfigError when this installation lacks what the kind needs."""
    if isinstance(section, MooncakeSection):
        try:
            import mooncake.engine  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f'transport.kind = "mooncake" needs the package mooncake-transfer-engine ({error}); '
                "scripts/mooncake.sh sets it up in .cache/mooncake, to be put on PYTHONPATH"
            ) from None


def open_transport(section: TransportSection, root: str, name: str, host: str) -> "WeightTransport":
    """The transport of the process `name` of a run, which alone publishes under `root`/`name`; best in shared memory.
    `host`: where other machines reach this one. Raises GyreError when it does not start."""
    own = f"{root}/{name}"
    if isinstance(section, MooncakeSection):
        from gyre.transport.mooncake import MooncakeTransport

        return MooncakeTransport(own, host, section)
    from gyre.transport.shm import ShmTransport

    return ShmTransport(own)
