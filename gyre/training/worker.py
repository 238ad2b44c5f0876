"""The trainer process: serves `Trainer` over RPC, with all torch work in one thread of its own."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from gyre.launch.base import WorkerContext
from gyre.rpc import serve
from gyre.training.base import MicroStepResult, StepStats, Trainer
from gyre.training.config import TrainerConfig
from gyre.training.trainer import MegatronTrainer
from gyre.trajectory.microstep import MicroStep
from gyre.transport.base import WeightRef
from gyre.transport.shm import ShmTransport

T = TypeVar("T")


class TrainerService:
    """`Trainer` over a `MegatronTrainer` that lives in one thread, so that the RPC loop answers during long steps.

    Calls run one after another in the order of arrival. A caller that gives up does not stop a call that has begun:
    after a cancelled `micro_step` the cell must `join` again before its gradient means anything.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="training")
        self._config = config

    async def start(self) -> None:
        """Builds the model; raises what the construction raises."""
        await self._run(self._build)

    def _build(self) -> None:
        # OpenMP's thread count belongs to the calling thread.
        torch.set_num_threads(self._config.threads)
        self._trainer = MegatronTrainer(self._config, ShmTransport(self._config.transport_root))

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def wake(self) -> None:
        await self._run(self._trainer.wake)

    async def sleep(self) -> None:
        await self._run(self._trainer.sleep)

    async def join(self, version: int, weights: WeightRef | None) -> None:
        await self._run(self._trainer.join, version, weights)

    async def micro_step(self, micro_step: MicroStep) -> MicroStepResult:
        return await self._run(self._trainer.micro_step, micro_step)

    async def reduce(self, generation: int, members: int) -> None:
        await self._run(self._trainer.reduce, generation, members)

    async def optimizer_step(self) -> StepStats:
        return await self._run(self._trainer.optimizer_step)

    async def publish(self) -> WeightRef:
        return await self._run(self._trainer.publish)

    async def score(self, ids_T: list[int]) -> list[float]:
        return await self._run(self._trainer.score, ids_T)

    async def save(self, directory: str) -> None:
        await self._run(self._trainer.save, directory)

    async def load(self, directory: str) -> int:
        return await self._run(self._trainer.load, directory)


async def main(config: TrainerConfig, context: WorkerContext) -> None:
    """Entry of the process (`gyre.launch`): builds the model, serves until cancelled."""
    service = TrainerService(config)
    await service.start()
    server = await serve(service, Trainer, context.address, context.secret)
    context.ready()
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        await server.stop()
