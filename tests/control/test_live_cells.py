"""Cells on real engine and trainer processes: one burst with a satellite that joins, updates, publishes, returns."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from gyre.control.live.cells import LiveCells
from gyre.engines.base import Engine, Sampling
from gyre.engines.local.config import LocalEngineConfig
from gyre.launch import LocalLauncher, ProcessSpec
from gyre.proxy.base import DrainReport, EngineRoute, ProxyControl
from gyre.rpc import connect
from gyre.store import RunDir
from gyre.training.base import ExecutionRows, MicroStep, Row, Trainer
from gyre.training.config import OptimizerConfig, TrainerConfig
from gyre.training.groups import StoreServer
from gyre.transport.shm import ShmTransport

VOCABULARY = 128
CELLS = 2


class ProxyThatRecords:
    """Stands for the proxy worker: no calls are running here, only the order of events matters."""

    def __init__(self) -> None:
        self.admitting: list[int] = []
        self.drained: list[int] = []

    async def set_routes(self, routes: list[EngineRoute]) -> None:
        self.admitting = [route.cell for route in routes]

    async def drain(self, cell: int) -> DrainReport:
        assert cell not in self.admitting
        self.drained.append(cell)
        return DrainReport(calls_in_flight=0, rerouted=0, failed=0)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    path = tmp_path / "model"
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
async def cells(tmp_path: Path, model_dir: Path) -> AsyncIterator[LiveCells]:
    run_dir = RunDir.create(tmp_path / "run", "")
    weights = str(tmp_path / "weights")
    rendezvous = StoreServer("127.0.0.1")
    async with LocalLauncher(run_dir.logs) as launcher:

        async def start(name: str, entry: str, config: msgspec.Struct) -> str:
            raw = msgspec.Raw(msgspec.json.encode(config))
            process = await launcher.start(
                ProcessSpec(name=name, entry=entry, config=raw, env={"OMP_NUM_THREADS": "1"})
            )
            return process.address

        engines, trainers, routes = {}, {}, {}
        for cell in range(CELLS):
            engine = await start(
                f"engine-{cell}",
                "gyre.engines.local.worker:main",
                LocalEngineConfig(
                    model_dir=str(model_dir), transport_root=weights, kv_blocks=64, max_context=256, seed=cell
                ),
            )
            trainer = await start(
                f"trainer-{cell}",
                "gyre.training.worker:main",
                TrainerConfig(
                    cell=cell,
                    cells=CELLS,
                    model_dir=str(model_dir),
                    transport_root=weights,
                    store=rendezvous.address,
                    optimizer=OptimizerConfig(learning_rate=1e-2),
                ),
            )
            engines[cell] = connect(Engine, engine, launcher.secret)
            trainers[cell] = connect(Trainer, trainer, launcher.secret)
            routes[cell] = EngineRoute(cell=cell, address=engine, capacity=4)
        proxy: ProxyControl = ProxyThatRecords()  # type: ignore[assignment]
        live = LiveCells(
            {cell: connection.stub for cell, connection in engines.items()},
            routes,
            {cell: connection.stub for cell, connection in trainers.items()},
            proxy,
            ShmTransport(weights),
            run_dir,
            1,
            Sampling(),
            VOCABULARY,
        )
        await live.start(None)
        yield live
        for connection in (*engines.values(), *trainers.values()):
            await connection.close()


def micro_step(name: str, seed: int) -> MicroStep:
    ids = torch.randint(0, VOCABULARY, (24,), generator=torch.Generator().manual_seed(seed)).tolist()
    targets = list(range(12, 24))
    row = Row(ids_T=ids, targets=targets, logprobs=[-4.5] * 12, versions=[0] * 12)
    rows = ExecutionRows(execution_id=name, advantage=1.0 if seed % 2 else -1.0, weight=1 / 24, rows=[row])
    return MicroStep(micro_step_id=name, groups=[0], executions=[rows], packs=[[(0, 0)]], tokens=24, cost=24.0)


async def test_a_burst_with_a_satellite_keeps_engines_and_core_equal(cells: LiveCells) -> None:
    await cells.set_admitting([1])
    assert (await cells.leave_rollout(0)).calls_in_flight == 0
    await cells.enter_training(0, 0)
    await cells.train(0, micro_step("a", 1))

    # The satellite joins the batch under way and pulls the core's weights of this step.
    await cells.set_admitting([])
    await cells.leave_rollout(1)
    await cells.enter_training(1, 0)
    await cells.train(1, micro_step("b", 2))
    stats = await cells.update(2, final=False)
    assert stats.version == 1
    assert stats.grad_norm > 0

    # Second step of the burst on the new weights, then the satellite returns and the core publishes.
    await cells.train(1, micro_step("c", 3))
    assert (await cells.update(2, final=True)).version == 2
    await cells.leave_training(1)
    await cells.enter_rollout(1, 0)
    path = Path(await cells.checkpoint(2))
    assert path.is_dir()
    probes = await cells.publish(2, [1])
    assert [probe.cell for probe in probes] == [1]
    assert probes[0].tokens > 0
    assert probes[0].logprob_gap_max <= 1e-3

    # The core returns with the published weights and samples from exactly them.
    await cells.leave_training(0)
    await cells.enter_rollout(0, 2)
    await cells.set_admitting([0, 1])
