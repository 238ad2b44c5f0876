"""[sandbox] of a run's configuration: where harnesses and graders run, and what one of them may use.

`kind` chooses the provider. The section goes whole into the runner's configuration; nothing is copied by hand.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gyre.core.config import Positive

Seconds = Annotated[float, Meta(gt=0)]


class SandboxLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[sandbox.limits]: what one sandbox may use, a harness's and a grader's alike. docs/outcomes.md says by what each
    limit holds on this machine; `gyre doctor` tells."""

    memory_mb: Positive = 4096
    """Of all processes together, with the files that they keep in memory."""
    processes: Positive = 512
    """Processes and threads, all together."""
    cpus: Annotated[float, Meta(gt=0)] = 2.0
    disk_mb: Positive = 10_240
    """All that the sandbox writes to the disk."""
    files: Positive = 500_000
    """Files and directories, all together."""
    file_mb: Positive = 4096
    """Largest file that may be written."""
    shm_mb: Positive = 256
    """Size of /dev/shm."""
    open_files: Positive = 4096
    """Of one process."""
    output_mb: Positive = 64
    """Of stdout and of stderr that is kept; what comes after is counted and dropped."""

    def with_task(
        self, *, memory_mb: int | None = None, cpus: float | None = None, disk_mb: int | None = None
    ) -> "SandboxLimits":
        """These limits with what a task asks for instead, where it asks."""
        asked = {"memory_mb": memory_mb, "cpus": cpus, "disk_mb": disk_mb}
        return msgspec.structs.replace(self, **{key: value for key, value in asked.items() if value})


class SandboxSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: Literal["bubblewrap"] = "bubblewrap"
    """The provider."""
    limits: SandboxLimits = SandboxLimits()
    require_limits: bool = False
    """Refuse to start where the kernel does not enforce the limits of memory, processes and CPUs."""
    term_grace_s: Seconds = 2.0
    """Between SIGTERM and SIGKILL when the time is up."""
    watch_s: Seconds = 1.0
    """How often, at most, disk use is measured, and memory where no cgroup limits it."""
    first_id: Annotated[int, Meta(ge=1, le=(1 << 32) - 2 - 65_536)] | None = None
    """Sandboxes that root starts run as the 65,536 host ids from here on. By default the first range from
    2,000,000,000 on that no user, group or subordinate range of this machine has."""
    images: dict[str, str] = {}
    """[sandbox.images]: base image, or a pattern that ends in `*` → a directory or tar file of a root file system, or
    another reference."""
    image_store: Path | None = None
    """Where images lie; /var/lib/gyre/images by default. Everybody must be able to pass the directories above."""
    pull: bool = False
    """Whether images that are neither here nor mapped are fetched from their registry."""
