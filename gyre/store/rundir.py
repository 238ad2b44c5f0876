"""The paths of a run directory: `config.toml`, `gyre.sqlite`, `checkpoints/`, `workspaces/`, `logs/`."""

import fcntl
import re
import shutil
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

from gyre.core.errors import ConfigError
from gyre.store.store import RunStore

_CHECKPOINT = re.compile(r"v(\d{6,})")


class Checkpoint(NamedTuple):
    version: int
    path: Path


class RunDir:
    """One run on disk. Make it with `create` or `open`. Its paths are absolute, for processes that work elsewhere."""

    def __init__(self, root: Path) -> None:
        root = root.absolute()
        self.root = root
        self.config = root / "config.toml"
        self.database = root / "gyre.sqlite"
        self.checkpoints = root / "checkpoints"
        self.workspaces = root / "workspaces"
        self.logs = root / "logs"

    @classmethod
    def create(cls, root: Path, config_text: str) -> Self:
        """A new run with this effective config. Raises ConfigError when `root` is taken or cannot be made."""
        run = cls(root)
        if run.database.exists():
            raise ConfigError(
                f"{root} already holds a run: continue it with --resume {root}, or choose another --run-dir."
            )
        if root.is_dir() and any(root.iterdir()):
            raise ConfigError(f"{root} is not empty and is no run: choose another --run-dir.")
        try:
            for directory in (run.checkpoints, run.workspaces, run.logs):
                directory.mkdir(parents=True, exist_ok=True)
            run.config.write_text(config_text)
        except OSError as error:
            raise ConfigError(
                f"{root} cannot be made a run directory ({error.strerror}): choose another --run-dir."
            ) from error
        run.open_store().close()
        return run

    @classmethod
    def open(cls, root: Path) -> Self:
        """An existing run. Raises ConfigError when `root` is none."""
        run = cls(root)
        if not root.is_dir():
            raise ConfigError(f"{root} does not exist: pass the run directory that `gyre train` printed.")
        for part in (run.config, run.database):
            if not part.is_file():
                raise ConfigError(f"{root} has no {part.name}: it is not a run directory made by `gyre train`.")
        return run

    def claim(self) -> BinaryIO:
        """Nobody else can claim the run until the returned file is closed or this process has ended. Raises ConfigError
        when another one has it."""
        held = self.config.open("rb+")
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.close()
            raise ConfigError(f"{self.root} is being trained by another process: let it end, or end it.") from None
        return held

    def open_store(self, *, read_only: bool = False) -> RunStore:
        return RunStore(self.database, read_only=read_only)

    def checkpoint_path(self, version: int) -> Path:
        """Place of a version's checkpoint; its writer makes it elsewhere and renames it when complete."""
        return self.checkpoints / f"v{version:06d}"

    def latest_checkpoint(self) -> Checkpoint | None:
        """The complete checkpoint of the highest version, or None when there is none yet."""
        return max(self._complete_checkpoints(), default=None)

    def prune_checkpoints(self, keep: int) -> None:
        """Removes all but the `keep` newest checkpoints."""
        for checkpoint in sorted(self._complete_checkpoints())[:-keep]:
            shutil.rmtree(checkpoint.path)

    def _complete_checkpoints(self) -> list[Checkpoint]:
        if not self.checkpoints.is_dir():
            return []
        found = ((_CHECKPOINT.fullmatch(entry.name), entry) for entry in self.checkpoints.iterdir() if entry.is_dir())
        return [Checkpoint(int(match[1]), entry) for match, entry in found if match]
