"""The run directory and its database: the one place where facts of a run are kept (docs/run-directory.md)."""

from gyre.store.rundir import Checkpoint, RunDir
from gyre.store.store import RunStore

__all__ = ["Checkpoint", "RunDir", "RunStore"]
