"""Case T27, routing replay from end to end: a policy with experts is sampled by the local engine through the
proxy over HTTP, stored, read again, and trained by Megatron."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import torch
from moe_models import plain_experts
from msgspec import UNSET
from proxy_app import App, running_app
from proxy_fakes import make_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from gyre.core.records import CallRecord
from gyre.engines.local.config import LocalEngineConfig, LocalSection
from gyre.engines.local.engine import LocalEngine
from gyre.samples.admission import admit
from gyre.samples.microstep import MicroStep
from gyre.samples.packing import pack
from gyre.samples.rows import build_execution
from gyre.store import RunStore
from gyre.trajectory.tree import TrajectoryTree
from gyre.transport.shm import ShmTransport
from gyre.transport.state import published_state

pytestmark = pytest.mark.live

CONFIG = Qwen3MoeConfig(
    vocab_size=272, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, num_experts=16, num_experts_per_tok=4,
    moe_intermediate_size=32, mlp_only_layers=[2], norm_topk_prob=True, tie_word_embeddings=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.15)
    directory = tmp_path_factory.mktemp("policy")
    model.save_pretrained(directory)
    make_tokenizer(directory)
    return directory


def load(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@contextlib.asynccontextmanager
async def sampled_by_engines(policy_dir: Path, root: Path, replay: bool) -> AsyncIterator[App]:
    """A proxy over two local engines that hold version 0."""
    transport = ShmTransport(str(root / "weights"))
    weights = transport.publish(0, published_state(load(policy_dir)))
    engines = []
    for cell in range(2):
        config = LocalEngineConfig(
            model_dir=str(policy_dir),
            transport_root=str(transport.root),
            weights=weights,
            section=LocalSection(kv_blocks=256, page_size=8),
            max_context=1024,
            seed=cell,
            replay_routing=replay,
        )
        engines.append(LocalEngine(config, ShmTransport(str(root / f"engine-{cell}"))))
        await engines[-1].start()
    try:
        tokenizer = make_tokenizer(root / "tokenizer")
        async with running_app(tokenizer, str, cells=2, max_context=1024, replay_routing=replay) as app:
            app.engines.update(enumerate(engines))
            yield app
    finally:
        for engine in engines:
            await engine.close()


async def converse(app: App, client: httpx.AsyncClient, execution: int) -> None:
    """Three calls in one execution: two turns, and another second turn that branches off the first."""

    async def ask(messages: list[dict[str, Any]], tokens: int = 40) -> dict[str, Any]:
        body = {"model": "m", "messages": messages, "max_tokens": tokens}
        response = await client.post(f"{app.url}/v1/chat/completions", json=body, headers=app.headers)
        assert response.status_code == 200, response.text
        message: dict[str, Any] = response.json()["choices"][0]["message"]
        return message

    head = [{"role": "user", "content": "List the files, please, and tell me what is in the largest one."}]
    first = await ask(head)
    again = {"role": "assistant", "content": first["content"]}
    await ask([*head, again, {"role": "user", "content": f"Go on, number {execution}."}])
    await ask([*head, again, {"role": "user", "content": "Stop."}])


async def record(policy_dir: Path, root: Path, replay: bool) -> dict[str, list[CallRecord]]:
    """Two executions on different engines, and a third whose call moves in the middle, through the run database."""
    root.mkdir()
    async with sampled_by_engines(policy_dir, root, replay) as app, httpx.AsyncClient(timeout=30) as client:
        for execution in range(2):
            app.router.set_routes([app.route(execution)])
            await app.open_another()
            await converse(app, client, execution)
        app.router.set_routes([app.route(1)])
        await app.open_another()
        body = {"model": "m", "messages": [{"role": "user", "content": "Count."}], "max_tokens": 300, "stream": True}
        async with client.stream("POST", f"{app.url}/v1/chat/completions", json=body, headers=app.headers) as stream:
            lines = stream.aiter_lines()
            async for line in lines:
                if "content" in line and len(line) > 20:
                    break
            app.router.set_routes([app.route(0)])
            await app.proxy.drain(1)
            async for _ in lines:
                pass
    found: dict[str, list[CallRecord]] = {}
    with RunStore(root / "gyre.sqlite") as store:
        for one in app.sink.records:
            store.put_record(one)
            found.setdefault(one.execution_id, []).append(one)
    reader = RunStore(root / "gyre.sqlite", read_only=True)
    assert {name: reader.records(name) for name in found} == found
    return found


def work(recorded: dict[str, list[CallRecord]]) -> MicroStep:
    """All executions as one group in one micro-step."""
    executions = []
    for number, (_, records) in enumerate(sorted(recorded.items())):
        tree = TrajectoryTree.from_records(records)
        admitted = admit(tree, j_max=None, seed=number)
        executions.append(build_execution(tree, admitted, advantage=(1.0, -0.5, -0.5)[number], batch_executions=3))
    (step,) = pack(0, executions, budget_tokens=10_000, micro_step_prefix="m")
    return step


def train(make_trainer: Any, step: MicroStep, **changes: object) -> tuple[Any, list[torch.Tensor]]:
    trainer = make_trainer(**changes)
    trainer.wake()
    trainer.join(0, None)
    return trainer.micro_step(step), trainer._replica.snapshot_gradients()


def perturbed(policy_dir: Path, target: Path, scale: float) -> str:
    """The same policy with routers that are a little off, as another kernel's rounding would make them."""
    model = load(policy_dir)
    torch.manual_seed(3)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Qwen3MoeTopKRouter):
                module.weight += scale * module.weight.std() * torch.randn_like(module.weight)
    model.save_pretrained(target)
    (target / "tokenizer_config.json").write_text("{}")
    return str(target)


def test_T27_the_trainer_takes_the_experts_that_the_engine_chose(
    policy_dir: Path, tmp_path: Path, make_trainer: Any
) -> None:
    """Also of prompts from the prefix cache, branches, and a call that moved with its KV; and with them the log-probs
    agree where a little noise would send tokens to other experts."""
    recorded = asyncio.run(record(policy_dir, tmp_path / "on", replay=True))
    (moved,) = recorded["g0-3"]
    assert moved.cells == [1, 0]
    policy, step = load(policy_dir), work(recorded)
    rows = [row for execution in step.executions for row in execution.rows]
    for row in rows:
        assert row.routing is not None
        assert row.routing.known().all()
        assert (np.sort(row.routing.choices(), -1) == plain_experts(policy, row.ids_T)[: row.routing.positions]).all()
    exact, _ = train(make_trainer, step, model_dir=str(policy_dir), replay_routing=True)
    assert exact.gap_max <= 5e-5
    assert exact.unrecorded == 0
    assert exact.replayed < sum(row.targets[-1] for row in rows), "shared prefixes are computed once"
    # What the moved call says depends on when it moved; the rest is the same in every run.
    step = work({name: recorded[name] for name in ("g0-1", "g0-2")})
    for factor, noise in (
        (10, {"model_dir": perturbed(policy_dir, tmp_path / "perturbed", 1e-3)}),
        (2, {"model_dir": str(policy_dir), "precision": "bfloat16"}),
    ):
        free, replayed = (train(make_trainer, step, replay_routing=on, **noise)[0] for on in (False, True))
        assert free.gap_count == replayed.gap_count > 100
        assert replayed.gap_max < free.gap_max / factor
        assert replayed.gap_sum < free.gap_sum


def test_T27_without_the_switch_nothing_is_asked_stored_or_changed(
    policy_dir: Path, tmp_path: Path, make_trainer: Any
) -> None:
    on = asyncio.run(record(policy_dir, tmp_path / "on", replay=True))
    off = asyncio.run(record(policy_dir, tmp_path / "off", replay=False))
    results = []
    for name in ("g0-1", "g0-2"):
        for with_, without in zip(on[name], off[name], strict=True):
            assert b"routing" not in msgspec.msgpack.encode(without)
            same = {"started_at": 0.0, "finished_at": 0.0, "routing": UNSET}
            assert msgspec.structs.replace(with_, **same) == msgspec.structs.replace(without, **same)
    for recorded in (on, off):
        step = work({name: recorded[name] for name in ("g0-1", "g0-2")})
        results.append(train(make_trainer, step, model_dir=str(policy_dir)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))
