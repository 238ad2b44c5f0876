"""A call that moves between two engine processes takes its KV along, and answers as if it had not."""

import asyncio
from dataclasses import dataclass

import msgspec
import pytest
import pytest_asyncio
from contract import CONTEXT, LONG, Answer, Rig, ask, close, prompt, request, tiny_config, until

from gyre.core.errors import GyreError, NotReady, WeightsUnavailable
from gyre.core.tokens import TokenIds
from gyre.engines.base import Engine, Sampling
from gyre.engines.local.config import LocalEngineConfig, LocalSection
from gyre.engines.local.engine import LocalEngine
from gyre.launch.base import ProcessSpec, encode_config
from gyre.launch.local import LocalLauncher
from gyre.proxy.base import EngineRoute
from gyre.proxy.router.router import Piece, Router, RouterLimits
from gyre.rpc import Connection, connect
from gyre.transport.shm import ShmTransport

pytestmark = pytest.mark.live

PAGE = 8


@dataclass
class Pair:
    rig: Rig
    """Publishes, and knows what is right."""
    source: Engine
    destination: Engine
    connections: list[Connection[Engine]]


def config(model_dir: str, root: str, **changes) -> LocalEngineConfig:
    fixed = {"kv_blocks": 256, "page_size": PAGE, "max_batch_tokens": 128, "max_context": CONTEXT, "seed": 0}
    fields = fixed | changes
    section = {name: fields.pop(name) for name in LocalSection.__struct_fields__ if name in fields}
    return LocalEngineConfig(model_dir=model_dir, transport_root=root, **fields, section=LocalSection(**section))


@pytest.mark.asyncio(loop_scope="class")
class TestTwoProcesses:
    @pytest_asyncio.fixture(loop_scope="class", scope="class")
    async def started(self, tmp_path_factory):
        model_dir = tmp_path_factory.mktemp("model")
        tiny_config().save_pretrained(model_dir)
        transport = ShmTransport(str(tmp_path_factory.mktemp("weights")))
        rig = Rig(None, transport, grain=PAGE)  # type: ignore[arg-type]
        async with LocalLauncher(tmp_path_factory.mktemp("logs")) as launcher:
            specs = [
                ProcessSpec(
                    name=f"engine-{i}",
                    entry="gyre.engines.local.worker:main",
                    config=encode_config(config(str(model_dir), str(transport.root), seed=i)),
                    env={"OMP_NUM_THREADS": "1"},
                )
                for i in range(2)
            ]
            processes = await asyncio.gather(*(launcher.start(spec) for spec in specs))
            connections = [connect(Engine, process.address, launcher.secret) for process in processes]
            yield Pair(rig, *(connection.stub for connection in connections), connections)
            for connection in connections:
                await connection.close()

    @pytest_asyncio.fixture(loop_scope="class")
    async def pair(self, started):
        for engine in (started.source, started.destination):
            await engine.update_weights(started.rig.publish(1))
        return started

    async def test_a_moved_call_goes_on_from_its_kv(self, pair):
        ids, answer = prompt(100), Answer()
        task = asyncio.create_task(ask(pair.source, request("a", ids, 250), answer))
        await until(lambda: len(answer.output_ids) > 20, task)
        await pair.source.abort("a")
        await task
        # Cut inside a block: when the abort came decides whether the very last token was an input of one more pass.
        produced = ids + answer.output_ids
        so_far = produced[: len(produced) // PAGE * PAGE - PAGE // 2]
        before = (await pair.destination.status()).kv_tokens_received
        ref = await pair.source.export_kv(TokenIds(so_far))
        assert ref is not None
        # The last token was never an input, and the last block may not be full.
        assert len(ref.input_ids) == (len(so_far) - 1) // PAGE * PAGE
        assert ref.input_ids == so_far[: len(ref.input_ids)]
        assert await pair.destination.import_kv(ref) == len(ref.input_ids)
        await pair.source.drop_kv(ref)
        moved = await ask(pair.destination, request("b", so_far, 30))
        assert moved.first.cached_tokens == len(ref.input_ids)
        assert (await pair.destination.status()).kv_tokens_received - before == len(ref.input_ids)
        close(moved.logprobs, pair.rig.expected(so_far, moved.output_ids, 1))

    async def test_it_answers_as_if_everything_were_computed_anew(self, pair):
        ids = prompt(100, seed=32)
        # So cold that every engine draws the likeliest token: then their answers can be compared.
        cold = {"temperature": 0.001}
        await ask(pair.source, request("a", ids, 2))
        ref = await pair.source.export_kv(TokenIds(ids))
        await pair.destination.import_kv(ref)
        moved = await ask(pair.destination, request("b", ids, 30, **cold))
        # The update drops all KV.
        await pair.destination.update_weights(pair.rig.publish(1))
        anew = await ask(pair.destination, request("c", ids, 30, **cold))
        assert (moved.first.cached_tokens, anew.first.cached_tokens) == (96, 0)
        assert moved.output_ids == anew.output_ids

    async def test_kv_moves_while_both_engines_work(self, pair):
        others = [
            asyncio.create_task(ask(e, request("o", prompt(20, 5), 200))) for e in (pair.source, pair.destination)
        ]
        ids = prompt(90, seed=1)
        await ask(pair.source, request("a", ids, 4))
        ref = await pair.source.export_kv(TokenIds(ids))
        assert await pair.destination.import_kv(ref) == 88
        moved = await ask(pair.destination, request("b", ids, 20))
        assert moved.first.cached_tokens == 88
        close(moved.logprobs, pair.rig.expected(ids, moved.output_ids, 1))
        for answer in await asyncio.gather(*others):
            close(answer.logprobs, pair.rig.expected(prompt(20, 5), answer.output_ids, 1))

    async def test_what_is_there_already_is_not_stored_twice(self, pair):
        ids = prompt(64, seed=2)
        await ask(pair.source, request("a", ids, 2))
        await ask(pair.destination, request("a", ids[:40], 2))
        ref = await pair.source.export_kv(TokenIds(ids))
        before = (await pair.destination.status()).kv_tokens_received
        assert await pair.destination.import_kv(ref) == await pair.destination.import_kv(ref) == 64
        assert (await pair.destination.status()).kv_tokens_received - before == 64 - 40
        moved = await ask(pair.destination, request("b", [*ids, 1], 5))
        assert moved.first.cached_tokens == 64
        close(moved.logprobs, pair.rig.expected([*ids, 1], moved.output_ids, 1))

    async def test_an_engine_with_nothing_offers_nothing(self, pair):
        assert await pair.source.export_kv(TokenIds(prompt(64, seed=3))) is None

    async def test_kv_of_other_weights_is_refused(self, pair):
        ids = prompt(64, seed=4)
        await ask(pair.source, request("a", ids, 2))
        ref = await pair.source.export_kv(TokenIds(ids))
        await pair.destination.update_weights(pair.rig.publish(2))
        with pytest.raises(NotReady, match="KV of version 1"):
            await pair.destination.import_kv(ref)
        answer = await ask(pair.destination, request("b", ids, 5))
        assert answer.first.cached_tokens == 0

    async def test_an_offer_that_was_dropped_is_gone_and_another_one_is_not(self, pair):
        first, second = prompt(32, seed=5), prompt(32, seed=6)
        refs = []
        for ids in (first, second):
            await ask(pair.source, request("a", ids, 2))
            refs.append(await pair.source.export_kv(TokenIds(ids)))
        await pair.source.drop_kv(refs[0])
        with pytest.raises(WeightsUnavailable):
            await pair.destination.import_kv(refs[0])
        assert await pair.destination.import_kv(refs[1]) == 32

    async def test_a_source_that_releases_its_memory_drops_what_it_offered(self, pair):
        ids = prompt(32, seed=8)
        await ask(pair.source, request("a", ids, 2))
        ref = await pair.source.export_kv(TokenIds(ids))
        await pair.source.release()
        await pair.source.restore()
        with pytest.raises(WeightsUnavailable):
            await pair.destination.import_kv(ref)

    async def test_the_proxy_moves_several_calls_at_once(self, pair):
        by_address = {connection.address: connection for connection in pair.connections}
        limits = RouterLimits(hold_s=30.0, stall_s=30.0, drain_s=30.0, handoff_s=30.0)
        router = Router(by_address.__getitem__, limits)
        source, destination = (
            EngineRoute(cell=cell, address=connection.address, capacity=8)
            for cell, connection in enumerate(pair.connections)
        )
        prompts = [prompt(80 + 10 * i, seed=20 + i) for i in range(4)]
        answers: list[list[Piece]] = [[] for _ in prompts]

        async def call(number: int) -> None:
            async for piece in router.generate(f"e{number}", TokenIds(prompts[number]), LONG, Sampling()):
                answers[number].append(piece)

        router.set_routes([source])
        calls = asyncio.gather(*(call(number) for number in range(len(prompts))))
        await until(lambda: all(answers), calls)
        router.set_routes([destination])
        report = await router.drain(0)
        await calls
        assert (report.rerouted, report.with_kv) == (4, 4)
        for ids, pieces in zip(prompts, answers, strict=True):
            outputs = [token for piece in pieces for token in piece.output_ids]
            at_source = sum(len(piece.output_ids) for piece in pieces if piece.cell == 0)
            first_moved = next(piece for piece in pieces if piece.cell == 1)
            assert first_moved.cached_tokens == (len(ids) + at_source - 1) // PAGE * PAGE
            logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
            assert len(outputs) == LONG
            close(logprobs, pair.rig.expected(ids, outputs, 1))

    async def test_kv_of_another_layout_is_refused(self, pair):
        ids = prompt(32, seed=7)
        await ask(pair.source, request("a", ids, 2))
        ref = await pair.source.export_kv(TokenIds(ids))
        with pytest.raises(GyreError, match="does not fit"):
            await pair.destination.import_kv(msgspec.structs.replace(ref, layout="16 tokens"))


async def test_only_free_memory_is_filled(tmp_path):
    """The prefix that fits arrives; nothing that the destination has is thrown away for it."""
    tiny_config().save_pretrained(tmp_path)
    transport = ShmTransport(str(tmp_path / "weights"))
    rig = Rig(None, transport, grain=PAGE)  # type: ignore[arg-type]
    weights = rig.publish(1)
    engines = []
    for name, blocks in (("large", 64), ("small", 20)):
        of = config(str(tmp_path), str(transport.root), kv_blocks=blocks, weights=weights)
        engines.append(LocalEngine(of, ShmTransport(str(tmp_path / name))))
        await engines[-1].start()
    large, small = engines
    try:
        ids, own = prompt(128, seed=1), prompt(64, seed=2)
        await ask(large, request("a", ids, 2))
        await ask(small, request("own", own, 2))
        ref = await large.export_kv(TokenIds(ids))
        assert ref is not None
        held = await small.import_kv(ref)
        assert 0 < held < 128
        still = await small.export_kv(TokenIds(own))
        assert still is not None
        assert still.input_ids == own
        moved = await ask(small, request("b", ids, 5))
        close(moved.logprobs, rig.expected(ids, moved.output_ids, 1))
    finally:
        for engine in engines:
            await engine.close()
