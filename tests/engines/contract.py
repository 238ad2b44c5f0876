"""What every engine owes its callers, written once. A test class inherits `EngineContract` and provides `rig`."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from gyre.core.errors import GyreError, NotReady, WeightsUnavailable
from gyre.core.tokens import TokenIds
from gyre.engines.base import Engine, GenerateChunk, GenerateRequest, PauseMode, Sampling
from gyre.transport.base import WeightRef
from gyre.transport.shm import ShmTransport
from gyre.transport.state import published_state

CONTEXT = 512
LONG = 250
"""Output tokens of a request that must still run when a test acts on it."""


def tiny_config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )


def tiny_model(seed: int) -> Qwen3ForCausalLM:
    """A policy whose distribution is far from uniform, so that wrong weights or wrong KV show in the log-probs."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(tiny_config()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    return model


@dataclass
class Rig:
    """An engine under test and the trainer's side of it."""

    engine: Engine
    transport: ShmTransport
    grain: int
    """Tokens of the engine's prefix-cache block."""
    sees_kv: bool = True
    """Whether `status` knows the KV blocks in use."""
    models: dict[int, Qwen3ForCausalLM] = field(default_factory=dict)

    def publish(self, version: int) -> WeightRef:
        model = self.models.setdefault(version, tiny_model(version))
        return self.transport.publish(version, published_state(model))

    def expected(self, ids: list[int], outputs: list[int], version: int, temperature: float = 1.0) -> list[float]:
        """Log-probs of a plain Hugging Face forward, [T_out]."""
        with torch.no_grad():
            logits = self.models[version](torch.tensor([ids + outputs])).logits[0] / temperature
        logprobs = torch.log_softmax(logits.float(), -1)
        return [logprobs[len(ids) - 1 + i, token].item() for i, token in enumerate(outputs)]


@dataclass
class Answer:
    chunks: list[GenerateChunk] = field(default_factory=list)

    def __getattr__(self, name: str):
        return [item for chunk in self.chunks for item in getattr(chunk, name)]

    @property
    def first(self) -> GenerateChunk:
        return self.chunks[0]

    @property
    def finish(self):
        return self.chunks[-1].finish


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def request(name: str, ids: list[int], new: int = 8, **sampling) -> GenerateRequest:
    return GenerateRequest(request_id=name, input_ids=ids, max_new_tokens=new, sampling=Sampling(**sampling))


async def ask(engine: Engine, asked: GenerateRequest, answer: Answer | None = None) -> Answer:
    answer = Answer() if answer is None else answer
    async for chunk in engine.generate(asked):
        assert len(chunk.output_ids) == len(chunk.logprobs) == len(chunk.versions)
        answer.chunks.append(chunk)
    assert answer.finish is not None
    assert all(chunk.finish is None for chunk in answer.chunks[:-1])
    return answer


async def until(condition: Callable[[], bool], task: asyncio.Task) -> None:
    """Waits for streamed progress of `task`."""
    async with asyncio.timeout(20):
        while not condition():
            assert not task.done(), f"ended early: {task}"
            await asyncio.sleep(0.005)


def close(found: list[float], expected: list[float]) -> None:
    assert len(found) == len(expected)
    worst = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    assert worst <= 1e-4, f"log-probs differ by {worst}"


class EngineContract:
    """`rig` is a fixture with an engine that holds version 1, runs nothing, and is not paused."""

    async def test_answers_with_exact_ids_and_logprobs(self, rig: Rig):
        ids = prompt(40)
        answer = await ask(rig.engine, request("a", ids, 12))
        assert answer.first.prompt_digest == TokenIds(ids).digest
        assert all(chunk.prompt_digest is None for chunk in answer.chunks[1:])
        assert len(answer.output_ids) == 12
        assert answer.versions == [1] * 12
        assert answer.finish == "length"
        close(answer.logprobs, rig.expected(ids, answer.output_ids, 1))

    async def test_logprobs_are_of_the_tempered_distribution(self, rig: Rig):
        ids = prompt(20)
        answer = await ask(rig.engine, request("a", ids, 12, temperature=0.6))
        close(answer.logprobs, rig.expected(ids, answer.output_ids, 1, temperature=0.6))

    async def test_many_at_once_do_not_mix(self, rig: Rig):
        lengths = [3, 17, 64, 150, 33, 5, 90, 16]
        prompts = [prompt(n, seed=n) for n in lengths]
        answers = await asyncio.gather(
            *(ask(rig.engine, request(f"r{i}", ids, 5 + i)) for i, ids in enumerate(prompts)),
        )
        for i, (ids, answer) in enumerate(zip(prompts, answers, strict=True)):
            assert answer.first.prompt_digest == TokenIds(ids).digest
            assert len(answer.output_ids) == 5 + i
            close(answer.logprobs, rig.expected(ids, answer.output_ids, 1))

    async def test_samples_follow_the_distribution(self, rig: Rig):
        ids = prompt(8)
        answers = await asyncio.gather(*(ask(rig.engine, request(f"r{i}", ids, 1)) for i in range(200)))
        tokens = [answer.output_ids[0] for answer in answers]
        probabilities = torch.softmax(rig.models[1](torch.tensor([ids])).logits[0, -1].float(), -1)
        best = int(probabilities.argmax())
        p = probabilities[best].item()
        assert abs(tokens.count(best) / 200 - p) < 5 * (p * (1 - p) / 200) ** 0.5 + 0.01

    async def test_every_stop_token_stops_and_is_kept(self, rig: Rig):
        ids = prompt(10)
        stops = list(range(0, 300, 2))
        answer = await ask(rig.engine, request("a", ids, 60, stop_token_ids=stops))
        assert answer.finish == "stop"
        assert answer.output_ids[-1] in stops
        assert not set(answer.output_ids[:-1]) & set(stops)
        close(answer.logprobs, rig.expected(ids, answer.output_ids, 1))

    async def test_the_context_ends_the_output(self, rig: Rig):
        answer = await ask(rig.engine, request("a", prompt(CONTEXT - 6), 100))
        assert answer.finish == "length"
        assert len(answer.output_ids) == 6
        with pytest.raises(GyreError, match="does not fit"):
            await ask(rig.engine, request("b", prompt(CONTEXT), 1))

    @pytest.mark.parametrize(
        ("asked", "reason"),
        [
            (request("a", prompt(4), temperature=0.0), "temperature"),
            (request("a", [], 4), "positive"),
            (request("a", prompt(4), 0), "positive"),
            (request("a", [1, 300], 4), "vocabulary"),
        ],
    )
    async def test_what_it_cannot_do_is_refused_by_name(self, rig: Rig, asked: GenerateRequest, reason: str):
        with pytest.raises(GyreError, match=reason):
            await ask(rig.engine, asked)

    async def test_a_second_turn_reuses_the_first(self, rig: Rig):
        ids = prompt(100)
        first = await ask(rig.engine, request("a", ids, 20))
        assert first.first.cached_tokens == 0
        longer = ids + first.output_ids + prompt(30, seed=9)
        second = await ask(rig.engine, request("b", longer, 10))
        # The last sampled token was never an input, so its KV does not exist yet.
        assert second.first.cached_tokens == (len(ids) + 19) // rig.grain * rig.grain
        close(second.logprobs, rig.expected(longer, second.output_ids, 1))
        assert (await rig.engine.status()).cached_tokens >= second.first.cached_tokens

    async def test_new_weights_answer_and_old_kv_is_dropped(self, rig: Rig):
        ids = prompt(100)
        await ask(rig.engine, request("a", ids))
        await rig.engine.update_weights(rig.publish(2))
        answer = await ask(rig.engine, request("b", ids))
        assert answer.first.cached_tokens == 0
        assert answer.versions == [2] * 8
        close(answer.logprobs, rig.expected(ids, answer.output_ids, 2))

    async def test_the_digest_is_of_the_weights_held(self, rig: Rig):
        for version in (2, 3):
            ref = rig.publish(version)
            await rig.engine.update_weights(ref)
            status = await rig.engine.status()
            assert (status.version, status.weights_checksum) == (version, ref.checksum)

    async def test_an_update_that_fails_changes_nothing(self, rig: Rig):
        before = await rig.engine.status()
        gone = rig.publish(7)
        rig.transport.retire({1})
        with pytest.raises(WeightsUnavailable):
            await rig.engine.update_weights(gone)
        wrong = published_state(rig.models[1])
        wrong["model.norm.weight"] = wrong["model.norm.weight"][:10]
        with pytest.raises(WeightsUnavailable, match="does not fit"):
            await rig.engine.update_weights(rig.transport.publish(8, wrong))
        after = await rig.engine.status()
        assert (after.version, after.weights_checksum) == (before.version, before.weights_checksum)
        ids = prompt(30)
        answer = await ask(rig.engine, request("a", ids))
        close(answer.logprobs, rig.expected(ids, answer.output_ids, 1))

    async def test_an_update_in_place_splits_the_versions_exactly(self, rig: Rig):
        ids, answer = prompt(50), Answer()
        task = asyncio.create_task(ask(rig.engine, request("a", ids, LONG), answer))
        await until(lambda: len(answer.output_ids) > 0, task)
        await rig.engine.pause(PauseMode.IN_PLACE)
        await rig.engine.update_weights(rig.publish(2))
        held = (await rig.engine.status()).generated_tokens
        await rig.engine.resume()
        await task
        assert len(answer.output_ids) == LONG
        old = answer.versions.count(1)
        assert answer.versions == [1] * old + [2] * (LONG - old)
        assert 0 < old < LONG
        assert (await rig.engine.status()).generated_tokens == held + LONG - old
        close(answer.logprobs[:old], rig.expected(ids, answer.output_ids, 1)[:old])
        close(answer.logprobs[old:], rig.expected(ids, answer.output_ids, 2)[old:])

    async def test_kv_of_old_weights_is_never_shared(self, rig: Rig):
        """What a request that lived through an update leaves behind for the next turn is of the new weights."""
        ids, answer = prompt(50), Answer()
        task = asyncio.create_task(ask(rig.engine, request("a", ids, LONG), answer))
        await until(lambda: len(answer.output_ids) > 0, task)
        await rig.engine.update_weights(rig.publish(2))
        await task
        assert set(answer.versions) == {1, 2}
        longer = ids + answer.output_ids
        second = await ask(rig.engine, request("b", longer, 5))
        close(second.logprobs, rig.expected(longer, second.output_ids, 2))
        third = await ask(rig.engine, request("c", longer, 5))
        assert third.first.cached_tokens > 0
        close(third.logprobs, rig.expected(longer, third.output_ids, 2))

    async def test_a_pause_in_place_stops_and_keeps(self, rig: Rig):
        ids, answer = prompt(50), Answer()
        task = asyncio.create_task(ask(rig.engine, request("a", ids, LONG), answer))
        await until(lambda: len(answer.output_ids) > 0, task)
        await rig.engine.pause(PauseMode.IN_PLACE)
        status = await rig.engine.status()
        assert status.paused
        assert status.running == 1
        assert status.kv_blocks_in_use > 0 or not rig.sees_kv
        waiting = asyncio.create_task(ask(rig.engine, request("b", prompt(5), 3)))
        await asyncio.sleep(0.2)
        assert (await rig.engine.status()).generated_tokens == status.generated_tokens
        assert not task.done()
        assert not waiting.done()
        await rig.engine.resume()
        await task
        assert len((await waiting).output_ids) == 3
        close(answer.logprobs, rig.expected(ids, answer.output_ids, 1))

    async def test_a_pause_by_abort_delivers_what_exists_and_admits_nothing(self, rig: Rig):
        prompts, answers = [prompt(30, seed=i) for i in range(3)], [Answer() for _ in range(3)]
        before = (await rig.engine.status()).generated_tokens
        tasks = [asyncio.create_task(ask(rig.engine, request(f"r{i}", prompts[i], LONG), answers[i])) for i in range(3)]
        await until(lambda: all(len(a.output_ids) > 0 for a in answers), tasks[0])
        await rig.engine.pause(PauseMode.ABORT)
        await asyncio.gather(*tasks)
        for ids, answer in zip(prompts, answers, strict=True):
            assert answer.finish == "abort"
            close(answer.logprobs, rig.expected(ids, answer.output_ids, 1))
        status = await rig.engine.status()
        assert status.running == 0
        assert status.generated_tokens - before == sum(len(a.output_ids) for a in answers)
        with pytest.raises(NotReady, match="paused"):
            await ask(rig.engine, request("late", prompt(5)))
        await rig.engine.resume()
        assert (await ask(rig.engine, request("later", prompt(5)))).finish == "length"

    async def test_abort_ends_one_request_and_keeps_its_tokens(self, rig: Rig):
        ids, answer = prompt(30), Answer()
        task = asyncio.create_task(ask(rig.engine, request("gone", ids, LONG), answer))
        other = asyncio.create_task(ask(rig.engine, request("stays", ids, 40)))
        await until(lambda: len(answer.output_ids) > 0, task)
        await rig.engine.abort("gone")
        await task
        assert answer.finish == "abort"
        assert 0 < len(answer.output_ids) < LONG
        close(answer.logprobs, rig.expected(ids, answer.output_ids, 1))
        assert len((await other).output_ids) == 40
        await rig.engine.abort("gone")
        await rig.engine.abort("never existed")

    async def test_an_aborted_call_goes_on_elsewhere_from_its_tokens(self, rig: Rig):
        ids, answer = prompt(30), Answer()
        task = asyncio.create_task(ask(rig.engine, request("a", ids, LONG), answer))
        await until(lambda: len(answer.output_ids) > 0, task)
        await rig.engine.abort("")
        await task
        longer = ids + answer.output_ids
        rest = await ask(rig.engine, request("a", longer, 5))
        close(answer.logprobs + rest.logprobs, rig.expected(ids, answer.output_ids + rest.output_ids, 1))

    async def test_closing_the_stream_cancels(self, rig: Rig):
        async def abandon() -> None:
            async for chunk in rig.engine.generate(request("a", prompt(30), LONG)):
                if chunk.output_ids:
                    await asyncio.Event().wait()

        before = (await rig.engine.status()).generated_tokens
        task = asyncio.create_task(abandon())
        await self.settles(rig, lambda status: status.running == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await self.settles(rig, lambda status: status.running == 0 and status.kv_blocks_in_use == 0)
        assert (await rig.engine.status()).generated_tokens - before < LONG
        # Another id: a server behind HTTP learns a little later that nobody reads the stream any more.
        assert (await ask(rig.engine, request("b", prompt(30), 3))).finish == "length"

    async def test_a_running_id_cannot_be_used_twice(self, rig: Rig):
        task = asyncio.create_task(ask(rig.engine, request("a", prompt(30), LONG)))
        await self.settles(rig, lambda status: status.running == 1)
        with pytest.raises(GyreError, match="already running"):
            await ask(rig.engine, request("a", prompt(5)))
        await rig.engine.abort("a")
        await task

    async def test_release_frees_and_restore_serves_again(self, rig: Rig):
        ids = prompt(60)
        await ask(rig.engine, request("a", ids))
        await rig.engine.pause(PauseMode.ABORT)
        await rig.engine.release()
        status = await rig.engine.status()
        assert status.released
        assert status.version == -1
        assert status.weights_checksum == ""
        with pytest.raises(NotReady):
            await rig.engine.update_weights(rig.publish(2))
        await rig.engine.resume()
        with pytest.raises(NotReady, match="released"):
            await ask(rig.engine, request("b", ids))
        await rig.engine.restore()
        with pytest.raises(NotReady, match="no weights"):
            await ask(rig.engine, request("c", ids))
        ref = rig.publish(2)
        await rig.engine.update_weights(ref)
        answer = await ask(rig.engine, request("d", ids))
        assert answer.first.cached_tokens == 0
        close(answer.logprobs, rig.expected(ids, answer.output_ids, 2))
        assert (await rig.engine.status()).weights_checksum == ref.checksum

    async def test_release_refuses_while_requests_run(self, rig: Rig):
        task = asyncio.create_task(ask(rig.engine, request("a", prompt(30), LONG)))
        await self.settles(rig, lambda status: status.running == 1)
        with pytest.raises(NotReady, match="running"):
            await rig.engine.release()
        await rig.engine.abort("")
        assert (await task).finish == "abort"

    async def test_a_pause_survives_release(self, rig: Rig):
        await rig.engine.pause(PauseMode.ABORT)
        await rig.engine.release()
        await rig.engine.restore()
        await rig.engine.update_weights(rig.publish(2))
        with pytest.raises(NotReady, match="paused"):
            await ask(rig.engine, request("a", prompt(5)))
        await rig.engine.resume()
        assert (await ask(rig.engine, request("a", prompt(5)))).versions == [2] * 8

    async def settles(self, rig: Rig, condition) -> None:
        async with asyncio.timeout(20):
            while not condition(await rig.engine.status()):  # noqa: ASYNC110 - the state is in another process
                await asyncio.sleep(0.01)


async def reset(rig: Rig) -> None:
    """Puts an engine back into the state that every test starts from."""
    await rig.engine.abort("")
    await rig.engine.resume()
    await rig.engine.restore()
    await rig.engine.update_weights(rig.publish(1))
