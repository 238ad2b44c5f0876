"""Configuration of a runner worker."""

import msgspec

from gyre.harnesses import ContextWindow
from gyre.sandboxes import Limits


class RunnerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run_dir: str
    """Absolute path of the run directory."""
    window: ContextWindow
    """The policy's, which harnesses must not overflow."""
    harness_root: str = ""
    """Where harnesses are installed; "" is `.cache/harnesses` of this checkout."""
    max_boots: int = 4
    """Sandboxes that boot at the same time."""
    max_evaluations: int = 2
    """Verifiers that run at the same time."""
    boot_attempts: int = 2
    evaluation_attempts: int = 2
    """Gradings of one preserved state until one is valid, while the overall budget lasts."""
    limits: Limits = Limits()
