"""[runner], and the configuration of a runner worker."""

import os
from typing import Annotated

import msgspec
from msgspec import Meta

from gyre.core.config import Positive
from gyre.evaluation import EvaluationSection
from gyre.harnesses import ContextWindow
from gyre.sandboxes import SandboxSection


class RunnerSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    boots: Positive | None = None
    """Sandboxes that boot at a time; twice as many as the machine has cores when it is left out. Who waits for its
    boot spends none of its budget."""
    boot_attempts: Positive = 2
    """Starts of one execution until its sandbox boots."""
    keep: Annotated[str, Meta(pattern=r"^(all|failed|last [1-9][0-9]{0,8})$")] = "last 200"
    """Workspaces of closed executions that stay: `all`, `failed` or `last N` (`gyre.runner.keeping`)."""

    @property
    def at_a_time(self) -> int:
        return self.boots or 2 * (os.cpu_count() or 1)


class RunnerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run_dir: str
    """Absolute path of the run directory."""
    window: ContextWindow
    """The policy's, which harnesses must not overflow."""
    harness_root: str = ""
    """Where harnesses are installed; "" is `.cache/harnesses` of this checkout."""
    shim: str = ""
    """RPC address of the shim that holds the sandboxes; "": the runner holds them itself, and they end with it."""
    section: RunnerSection = RunnerSection()
    evaluation: EvaluationSection = EvaluationSection()
    sandbox: SandboxSection = SandboxSection()
