"""Which workspaces of closed executions stay on the disk (`runner.keep`)."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from gyre.core.errors import GyreError
from gyre.core.records import Outcome, Validity

log = logging.getLogger(__name__)


class Keeper:
    """`all` keeps every workspace; `failed` those of executions that are not valid or whose assessment has a flag;
    `last N` the newest N, those of an earlier runner of this run directory included. The others are removed in the
    background, as soon as their outcome is stored."""

    def __init__(
        self, policy: str, directory: Path, earlier: Collection[str], remove: Callable[[Path], Awaitable[None]]
    ) -> None:
        """`earlier`: executions that closed under runners before this one. Others that have a workspace still run."""
        self._policy = policy
        self._most = int(policy.removeprefix("last ")) if policy.startswith("last ") else None
        self._directory = directory
        self._remove = remove
        self._removing: set[asyncio.Task[None]] = set()
        found = sorted(directory.iterdir(), key=lambda path: path.lstat().st_mtime) if directory.is_dir() else []
        self._kept = deque(path.name for path in found if path.name in earlier)

    def closed(self, outcome: Outcome) -> None:
        name = outcome.execution_id
        if self._policy == "failed" and not _failed(outcome):
            self._collect(name)
        if self._most is not None:
            if name in self._kept:
                self._kept.remove(name)
            self._kept.append(name)
            while len(self._kept) > self._most:
                self._collect(self._kept.popleft())

    async def close(self) -> None:
        """Returns when what is being removed is gone."""
        await asyncio.gather(*self._removing)

    def _collect(self, name: str) -> None:
        task = asyncio.create_task(self._removed(self._directory / name))
        self._removing.add(task)
        task.add_done_callback(self._removing.discard)

    async def _removed(self, path: Path) -> None:
        try:
            await self._remove(path)
        except (GyreError, OSError) as error:
            log.warning("workspace %s stays: %s", path, error)


def _failed(outcome: Outcome) -> bool:
    return outcome.validity is not Validity.VALID or bool(outcome.assessment and outcome.assessment.flags)
