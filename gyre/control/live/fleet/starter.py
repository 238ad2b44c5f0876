"""Starts processes of a run through its launcher: names that no process had before, one thread each, a second attempt.

The first process for `engine-1` has that name, its replacements are `engine-1.1`, `engine-1.2` and so on, under this
controller and the next ones: sockets and logs of each are its own.
"""

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from gyre.core.errors import KilledWhileStarting
from gyre.launch.base import HERE, Launcher, Process, ProcessSpec, encode_config

T = TypeVar("T")

START_ATTEMPTS = 3
START_TIMEOUT_S = 120.0
"""Of every process but engines, whose kind says it."""

# Several numerical processes share the cores of one machine: more than one thread each makes all of them slower.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class Starter:
    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self._numbers: dict[str, int] = {}

    def new_name(self, name: str) -> tuple[str, int]:
        """The name of the next process for `name`, and its number."""
        number = self._numbers.setdefault(name, self.launcher.next_number(name))
        self._numbers[name] += 1
        return f"{name}.{number}" if number else name, number

    async def start(
        self,
        name: str,
        entry: str,
        config: msgspec.Struct,
        start_timeout_s: float = START_TIMEOUT_S,
        bundle: str = HERE,
        devices: Sequence[int] = (),
    ) -> Process:
        """Raises GyreError when the process is not ready in time."""
        return await self.launcher.start(
            ProcessSpec(
                name=name,
                entry=entry,
                config=encode_config(config),
                bundle=bundle,
                devices=list(devices),
                env=ONE_THREAD,
                start_timeout_s=start_timeout_s,
            )
        )


async def again(start: Callable[[], Awaitable[T]]) -> T:
    """A start that a signal ended is tried again."""
    for _ in range(START_ATTEMPTS - 1):
        with contextlib.suppress(KilledWhileStarting):
            return await start()
    return await start()
