"""The local engine tells the experts that computed every token's KV, as its own routers chose them."""

import asyncio
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
import pytest_asyncio
from contract import prompt, until
from moe_models import moe_config, moe_model, plain_experts
from msgspec.structs import replace
from transformers import Qwen3Config

from gyre.core.errors import ConfigError, GyreError
from gyre.core.expert_routing import ExpertRouting, joined
from gyre.core.tokens import TokenIds
from gyre.engines.base import GenerateChunk, GenerateRequest, Sampling
from gyre.engines.local.config import LocalEngineConfig, LocalSection
from gyre.engines.local.engine import LocalEngine
from gyre.transport.shm import ShmTransport
from gyre.transport.state import published_state

pytestmark = pytest.mark.live

PAGE = 8
CONFIG = moe_config(mlp_only_layers=[1])
MODELS = {version: moe_model(CONFIG, version) for version in (1, 2)}


def expected(ids: list[int], version: int) -> np.ndarray:
    return plain_experts(MODELS[version], ids)


def asked(name: str, ids: list[int], new: int, start: int | None = 0) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, input_ids=TokenIds(ids), max_new_tokens=new, sampling=Sampling(), routing_from=start
    )


async def answer(engine: LocalEngine, request: GenerateRequest, chunks: list[GenerateChunk]) -> list[int]:
    async for chunk in engine.generate(request):
        chunks.append(chunk)
    return [token for chunk in chunks for token in chunk.output_ids]


def told(chunks: list[GenerateChunk]) -> ExpertRouting:
    return joined([chunk.routing for chunk in chunks if chunk.routing is not None])


def check(routing: ExpertRouting, ids: list[int], start: int, version: int = 1) -> None:
    """`ids` is prompt and answer: the last token was not routed."""
    assert routing.shape == (2, 2, 7)
    assert routing.known().all()
    assert routing.positions == len(ids) - 1 - start
    assert (np.sort(routing.choices(), -1) == expected(ids, version)[start : len(ids) - 1]).all()


Make = Callable[..., LocalEngine]


@pytest_asyncio.fixture
async def make(tmp_path) -> AsyncIterator[Make]:
    CONFIG.save_pretrained(tmp_path / "model")
    transport = ShmTransport(str(tmp_path / "weights"))
    refs = {version: transport.publish(version, published_state(made)) for version, made in MODELS.items()}
    started: list[LocalEngine] = []

    async def start(**changes: object) -> LocalEngine:
        fields = {
            "model_dir": str(tmp_path / "model"), "transport_root": str(transport.root), "weights": refs[1],
            "section": LocalSection(kv_blocks=256, page_size=PAGE, max_batch_tokens=48, max_requests=16),
            "replay_routing": True, "max_context": 8192, "seed": 0,
        }  # fmt: skip
        section = {name: changes.pop(name) for name in LocalSection.__struct_fields__ if name in changes}
        fields["section"] = replace(fields["section"], **section)
        config = LocalEngineConfig(**(fields | changes))
        engine = LocalEngine(config, ShmTransport(str(tmp_path / f"engine-{len(started)}")))
        engine.refs = refs  # type: ignore[attr-defined]
        started.append(engine)
        await engine.start()
        return engine

    yield start
    for engine in started:
        await engine.close()


async def test_every_position_before_the_last_token_is_told_once(make: Make) -> None:
    """Prompts longer than a pass, shorter than a block, and several at once."""
    engine = await make()
    prompts = [prompt(n, seed=n) for n in (130, 3, 40, 17)]
    chunks: list[list[GenerateChunk]] = [[] for _ in prompts]
    outputs = await asyncio.gather(
        *(answer(engine, asked(f"r{i}", ids, 20), chunks[i]) for i, ids in enumerate(prompts))
    )
    for ids, output, mine in zip(prompts, outputs, chunks, strict=True):
        check(told(mine), ids + output, 0)
        assert mine[0].routing is not None
        assert mine[0].routing.positions >= len(ids)


async def test_what_the_prefix_cache_serves_has_a_record_too(make: Make) -> None:
    engine = await make()
    ids, first, second, third = prompt(60), [], [], []
    output = await answer(engine, asked("a", ids, 12), first)
    later = ids + output + prompt(9, seed=3)
    more = await answer(engine, asked("b", later, 5), second)
    assert second[0].cached_tokens >= 64
    check(told(second), later + more, 0)
    start = len(ids + output) - 1
    again = await answer(engine, asked("c", later, 5, start), third)
    check(told(third), later + again, start)


async def test_an_update_in_the_middle_keeps_what_was_told(make: Make) -> None:
    """Tokens of the old weights were sampled with the old choices, and later ones with the new weights' own."""
    engine = await make()
    ids, chunks = prompt(50), list[GenerateChunk]()
    task = asyncio.create_task(answer(engine, asked("a", ids, 200), chunks))
    await until(lambda: sum(len(chunk.output_ids) for chunk in chunks) > 20, task)
    await engine.update_weights(engine.refs[2])  # type: ignore[attr-defined]
    output = await task
    versions = [version for chunk in chunks for version in chunk.versions]
    routing = np.sort(told(chunks).choices(), -1)
    cut = len(ids) + versions.index(2) - 1  # the position that predicted the first token of version 2
    assert len(routing) == len(ids) + len(output) - 1
    assert (routing[:cut] == expected(ids + output, 1)[:cut]).all()
    assert (routing[cut:] == expected(ids + output, 2)[cut : len(routing)]).all()


async def test_requests_that_are_put_back_tell_each_position_once(make: Make) -> None:
    """KV memory for less than half of them: they are put back and computed again."""
    engine = await make(kv_blocks=24)
    prompts = [prompt(40, seed=i) for i in range(6)]
    chunks: list[list[GenerateChunk]] = [[] for _ in prompts]
    outputs = await asyncio.gather(
        *(answer(engine, asked(f"r{i}", ids, 60), chunks[i]) for i, ids in enumerate(prompts))
    )
    for ids, output, mine in zip(prompts, outputs, chunks, strict=True):
        check(told(mine), ids + output, 0)


async def test_kv_that_moves_brings_its_experts(make: Make) -> None:
    source, destination = await make(), await make(seed=1)
    ids, chunks = prompt(64), list[GenerateChunk]()
    await answer(source, asked("a", ids, 2), [])
    ref = await source.export_kv(TokenIds(ids))
    assert ref is not None
    assert await destination.import_kv(ref) == 64
    output = await answer(destination, asked("b", [*ids, 1], 5), chunks)
    assert chunks[0].cached_tokens == 64
    check(told(chunks), [*ids, 1, *output], 0)
    plain = await make(replay_routing=False)
    with pytest.raises(GyreError, match="bytes of experts"):
        await plain.import_kv(ref)


async def test_nobody_is_told_what_nobody_asked(make: Make) -> None:
    engine, chunks = await make(), list[GenerateChunk]()
    await answer(engine, asked("a", prompt(20), 5, None), chunks)
    assert all(chunk.routing is None for chunk in chunks)
    with pytest.raises(GyreError, match="position 20 of a prompt of 20"):
        await answer(engine, asked("b", prompt(20), 5, 20), [])
    plain = await make(replay_routing=False)
    with pytest.raises(GyreError, match="not started to tell experts"):
        await answer(plain, asked("a", prompt(20), 5), [])


async def test_a_model_without_experts_is_refused_at_the_start(make: Make, tmp_path) -> None:
    Qwen3Config(vocab_size=300, hidden_size=32, num_hidden_layers=1).save_pretrained(tmp_path / "dense")
    with pytest.raises(ConfigError, match="no routers of a qwen3 model"):
        await make(model_dir=str(tmp_path / "dense"), weights=None)
