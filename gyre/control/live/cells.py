"""`Cells` on real engines and trainers: role transitions, micro-steps, updates, publication.

Every cell owns an engine process and a trainer process that share its devices; at any time at most one of the two holds
memory. The core's trainer is the only one with optimizer state.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from gyre.control.base import Handoff, Probe, UpdateStats, WorkResult
from gyre.core.errors import InvariantViolation
from gyre.engines.base import Engine, GenerateRequest, PauseMode, Sampling
from gyre.proxy.base import EngineRoute, ProxyControl
from gyre.store import RunDir
from gyre.training.base import MicroStep, Trainer
from gyre.transport.base import WeightRef, WeightTransport

CORE = 0
PROBE_TOKENS = 12
# Prefix groups live as long as their members; a lost trainer ends the run, so there is only one generation of them.
GENERATION = 0


class LiveCells:
    """Cells 0..K−1 have an engine and a trainer; pool engines have negative indices and no trainer."""

    def __init__(
        self,
        engines: dict[int, Engine],
        routes: dict[int, EngineRoute],
        trainers: dict[int, Trainer],
        proxy: ProxyControl,
        transport: WeightTransport,
        run_dir: RunDir,
        keep_checkpoints: int,
        sampling: Sampling,
        vocabulary: int,
    ) -> None:
        self._engines = engines
        self._routes = routes
        self._trainers = trainers
        self._proxy = proxy
        self._transport = transport
        self._run_dir = run_dir
        self._keep_checkpoints = keep_checkpoints
        self._sampling = sampling
        self._vocabulary = vocabulary
        self._published: WeightRef | None = None
        self._snapshot: WeightRef | None = None
        self._snapshot_lock = asyncio.Lock()
        self._probes = 0

    async def start(self, checkpoint: Path | None) -> None:
        """Brings version 0 (or the checkpoint's version) from the core to every engine."""
        core = self._trainers[CORE]
        await core.wake()
        version = await core.load(str(checkpoint)) if checkpoint else 0
        await core.join(version, None)
        self._published = await self._core_snapshot(version)
        await core.sleep()
        await asyncio.gather(*(engine.update_weights(self._published) for engine in self._engines.values()))

    async def set_admitting(self, cells: Sequence[int]) -> None:
        await self._proxy.set_routes([self._routes[cell] for cell in cells])

    async def leave_rollout(self, cell: int) -> Handoff:
        report = await self._proxy.drain(cell)
        engine = self._engines[cell]
        await engine.pause(PauseMode.ABORT)
        await engine.release()
        return Handoff(calls_in_flight=report.calls_in_flight, rerouted=report.rerouted)

    async def enter_training(self, cell: int, version: int) -> None:
        trainer = self._trainers[cell]
        await trainer.wake()
        await trainer.join(version, None if cell == CORE else await self._core_snapshot(version))

    async def train(self, cell: int, work: MicroStep) -> WorkResult:
        result = await self._trainers[cell].micro_step(work)
        return WorkResult(
            loss=result.loss,
            targets=result.targets,
            executions=result.executions,
            clipped_executions=result.clipped_executions,
            gap_count=result.gap_count,
            gap_sum=result.gap_sum,
            gap_max=result.gap_max,
        )

    async def leave_training(self, cell: int) -> None:
        await self._trainers[cell].sleep()

    async def enter_rollout(self, cell: int, version: int) -> None:
        assert self._published is not None
        if self._published.version != version:
            raise InvariantViolation(f"cell {cell} asked for version {version}, published is {self._published.version}")
        engine = self._engines[cell]
        await engine.restore()
        await engine.update_weights(self._published)
        await engine.resume()

    async def update(self, members: int, final: bool) -> UpdateStats:
        group = [self._trainers[cell] for cell in range(members)]
        await asyncio.gather(*(trainer.reduce(GENERATION, members) for trainer in group))
        stats = await self._trainers[CORE].optimizer_step()
        if not final:
            weights = await self._core_snapshot(stats.version) if members > 1 else None
            await asyncio.gather(
                *(trainer.join(stats.version, weights if cell else None) for cell, trainer in enumerate(group))
            )
        return UpdateStats(version=stats.version, grad_norm=stats.grad_norm)

    async def publish(self, version: int, rollout_cells: Sequence[int]) -> list[Probe]:
        self._published = await self._core_snapshot(version)
        await asyncio.gather(*(self._refresh(cell) for cell in rollout_cells))
        self._transport.retire({version})
        return [await self._probe(cell) for cell in rollout_cells]

    async def checkpoint(self, version: int) -> str:
        path = self._run_dir.checkpoint_path(version)
        await self._trainers[CORE].save(str(path))
        self._run_dir.prune_checkpoints(self._keep_checkpoints)
        return str(path)

    async def _core_snapshot(self, version: int) -> WeightRef:
        """The core's weights of `version`, published once however many cells ask."""
        async with self._snapshot_lock:
            if self._snapshot is None or self._snapshot.version != version:
                self._snapshot = await self._trainers[CORE].publish()
            if self._snapshot.version != version:
                raise InvariantViolation(f"the core is at version {self._snapshot.version}, expected {version}")
            return self._snapshot

    async def _refresh(self, cell: int) -> None:
        assert self._published is not None
        engine = self._engines[cell]
        await engine.pause(PauseMode.IN_PLACE)
        try:
            await engine.update_weights(self._published)
        finally:
            await engine.resume()

    async def _probe(self, cell: int) -> Probe:
        """Lets the engine sample a few tokens and the core score them under the weights just published."""
        self._probes += 1
        prompt = [(self._probes * 7 + i * 13) % self._vocabulary for i in range(PROBE_TOKENS)]
        request = GenerateRequest(
            request_id=f"probe-{self._probes}",
            input_ids=prompt,
            max_new_tokens=PROBE_TOKENS,
            sampling=Sampling(temperature=self._sampling.temperature, top_p=self._sampling.top_p),
        )
        ids: list[int] = []
        logprobs: list[float] = []
        async for chunk in self._engines[cell].generate(request):
            ids += chunk.output_ids
            logprobs += chunk.logprobs
        scored = await self._trainers[CORE].score([*prompt, *ids])
        gap = max(abs(a - b) for a, b in zip(scored[len(prompt) - 1 :], logprobs, strict=True))
        return Probe(cell=cell, tokens=len(ids), logprob_gap_max=gap)
