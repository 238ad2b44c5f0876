"""A harness that repeats a request: retries of lost answers are replayed, everything else is sampled (issue 13)."""

import asyncio
import itertools
import socket
from typing import Any
from unittest.mock import patch

import httpx
import msgspec
import pytest
from proxy_app import App, plain_client, running_app
from proxy_fakes import ScriptedEngine, until

from gyre.proxy.dialects.base import TurnHead
from gyre.proxy.session.call import Asked, ModelCall
from gyre.proxy.session.repeats import Repeats, says_retry
from gyre.trajectory.tree import TrajectoryTree

ASK = {"model": "m", "max_tokens": 500, "stream": True, "messages": [{"role": "user", "content": "go"}]}
PATHS = ["/v1/messages", "/v1/chat/completions", "/v1/responses"]
RETRY = {"x-stainless-retry-count": "1"}


def body(path: str, **changes: Any) -> dict[str, Any]:
    asked = {**ASK, **changes}
    if path.endswith("responses"):
        asked = {**asked, "input": asked.pop("messages"), "max_output_tokens": asked.pop("max_tokens")}
    return asked


def numbered() -> Any:
    """A policy that says something else at every sample."""
    numbers = itertools.count(1)
    return lambda prompt: f"candidate {next(numbers)}"


async def post(app: App, path: str, asked: dict[str, Any], **headers: str) -> httpx.Response:
    async with plain_client(timeout=20) as client:
        return await client.post(app.url + path, json=asked, headers={**app.headers, **headers})


def words(app: App) -> list[str]:
    """What the policy said in each recorded call."""
    return [app.script.tokenizer.decode(record.output_ids[:-1]) for record in app.sink.records]


def calls(app: App) -> list[ModelCall]:
    return [call for known in app.session()._repeats._calls.values() for call in known]


async def lose(app: App, path: str, asked: dict[str, Any], believed: bool = True) -> bytes:
    """Asks, sees the whole answer without reading it, and goes away. Returns the body that was not read."""
    payload = msgspec.json.encode(asked)
    head = f"POST {app.access.path}{path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {app.access.api_key}\r\n"
    not_read = ModelCall.not_read
    told: list[ModelCall] = []
    with (
        patch.object(ModelCall, "not_read", lambda call: (told.append(call), not_read(call))),
        socket.create_connection(("127.0.0.1", int(app.base.rsplit(":", 1)[1]))) as client,
    ):
        client.sendall(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
        client.setblocking(False)
        seen = b""

        def whole() -> bool:
            nonlocal seen
            try:
                seen = client.recv(2**20, socket.MSG_PEEK)
            except BlockingIOError:
                return False
            return seen.endswith(b"\r\n0\r\n\r\n")

        await until(whole)
        await until(lambda: any(call.delivered for call in calls(app)))
        client.close()
        await until(lambda: told)
    assert told[0].lost == believed
    return dechunked(seen.partition(b"\r\n\r\n")[2])


def dechunked(data: bytes) -> bytes:
    out = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        out, data = out + data[: int(size, 16)], data[int(size, 16) + 2 :]
    return out


@pytest.mark.parametrize("path", PATHS)
async def test_a_repeat_after_the_whole_answer_is_a_new_sample(proxy_tokenizer: Any, path: str) -> None:
    async with running_app(proxy_tokenizer, numbered()) as app:
        for stream in (True, False, True):
            assert (await post(app, path, body(path, stream=stream))).status_code == 200
        assert words(app) == ["candidate 1", "candidate 2", "candidate 3"]
        assert all(record.trainable for record in app.sink.records)
        tree = TrajectoryTree.from_records(app.sink.records)
        assert [leaf.eligible for leaf in tree.leaves()] == [True] * 3
        assert len({len(tree.path_ids(record.call_id)) for record in app.sink.records}) == 1
        assert app.session().counts["replayed"] == 0


@pytest.mark.parametrize("path", PATHS)
async def test_equal_requests_at_once_are_as_many_samples(proxy_tokenizer: Any, path: str) -> None:
    async with running_app(proxy_tokenizer, numbered()) as app:
        answers = await asyncio.gather(*(post(app, path, body(path)) for _ in range(4)))
        assert len({answer.content for answer in answers}) == 4
        assert sorted(words(app)) == [f"candidate {i}" for i in range(1, 5)]


async def test_the_way_of_one_of_several_samples_goes_on_from_its_own_tokens(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, numbered()) as app:
        for _ in range(3):
            await post(app, PATHS[0], ASK)
        more = [
            *ASK["messages"],  # type: ignore[misc]
            {"role": "assistant", "content": "candidate 2"},
            {"role": "user", "content": "go on"},
        ]
        await post(app, PATHS[0], {**ASK, "messages": more})
        assert app.sink.records[3].parent == app.sink.records[1].call_id


@pytest.mark.parametrize("path", PATHS)
async def test_an_answer_that_nobody_read_is_replayed_byte_for_byte(proxy_tokenizer: Any, path: str) -> None:
    async with running_app(proxy_tokenizer, numbered()) as app:
        lost = await lose(app, path, body(path))
        digest = app.session().tree.digest()
        assert (await post(app, path, body(path, metadata={"try": "2"}))).content == lost
        assert app.session().tree.digest() == digest
        assert len(app.engines[0].requests) == 1
        # It has been delivered now: the next one is on purpose.
        assert (await post(app, path, body(path))).content != lost
        assert words(app) == ["candidate 1", "candidate 2"]
        summary = await app.proxy.close_session("g0-0")
        assert (summary.calls, summary.retries_replayed, summary.retries_attached, summary.orphans) == (2, 1, 0, 0)


async def test_a_lost_stream_may_be_asked_for_whole(proxy_tokenizer: Any) -> None:
    """Claude Code's fallback after a cut stream: the same body without `stream`."""
    async with running_app(proxy_tokenizer, numbered()) as app:
        await lose(app, PATHS[0], ASK)
        whole = await post(app, PATHS[0], {key: value for key, value in ASK.items() if key != "stream"})
        assert whole.json()["content"] == [{"type": "text", "text": "candidate 1"}]


@pytest.mark.parametrize(
    "change",
    [{"temperature": 1.0}, {"tool_choice": {"type": "any"}}, {"seed": 7}, {"model": "other"}, {"max_tokens": 501}],
    ids=lambda change: next(iter(change)),
)
async def test_another_wish_after_a_lost_answer_is_a_new_sample(proxy_tokenizer: Any, change: dict[str, Any]) -> None:
    async with running_app(proxy_tokenizer, numbered()) as app:
        await lose(app, PATHS[0], ASK)
        assert (await post(app, PATHS[0], {**ASK, **change})).status_code == 200
        assert words(app) == ["candidate 1", "candidate 2"]


async def test_a_client_that_never_reads_to_the_end_is_replayed_once(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, numbered()) as app:
        first = await lose(app, PATHS[0], ASK)
        assert await lose(app, PATHS[0], ASK, believed=False) == first
        await post(app, PATHS[0], ASK)
        assert words(app) == ["candidate 1", "candidate 2"]


class Gate:
    def __init__(self, engine: ScriptedEngine, after: int) -> None:
        self.open = asyncio.Event()

        async def step(done: int) -> None:
            if done >= after:
                await self.open.wait()

        engine.step = step


async def test_a_marked_retry_of_a_running_call_attaches(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, numbered()) as app:
        gate = Gate(app.engines[0], 5)
        first = asyncio.create_task(post(app, PATHS[0], ASK, **{"x-stainless-retry-count": "0"}))
        await until(lambda: app.session().running)
        second = asyncio.create_task(post(app, PATHS[0], ASK, **RETRY))
        await until(lambda: app.session().counts["attached"])
        gate.open.set()
        assert (await first).content == (await second).content
        assert words(app) == ["candidate 1"]


async def test_a_marked_retry_of_a_delivered_answer_is_replayed(proxy_tokenizer: Any) -> None:
    """The client says so: it read the answer from the kernel's buffers no more."""
    async with running_app(proxy_tokenizer, numbered()) as app:
        first = await post(app, PATHS[1], ASK)
        assert (await post(app, PATHS[1], ASK, **RETRY)).content == first.content
        assert (await post(app, PATHS[1], ASK)).content != first.content


async def test_a_repeated_idempotency_key_is_a_retry_and_another_key_is_not(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, numbered()) as app:
        got = [(await post(app, PATHS[1], ASK, **{"idempotency-key": key})).content for key in ("a", "b", "a")]
        assert got[0] == got[2] != got[1]


async def test_the_retry_of_an_abandoned_call_gets_no_answer_of_a_sibling(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, numbered()) as app:
        gate = Gate(app.engines[0], 5)
        asking = [asyncio.create_task(post(app, PATHS[1], ASK)) for _ in range(3)]
        await until(lambda: app.session().running == 3 and all(call._events for call in calls(app)))
        asking[1].cancel()
        await until(lambda: app.session().counts["orphans"] == 1)
        again = asyncio.create_task(post(app, PATHS[1], ASK, **RETRY))
        await until(lambda: len(app.engines[0].requests) == 4)
        gate.open.set()
        answers = {(await asking[0]).content, (await asking[2]).content, (await again).content}
        assert len(answers) == 3


async def test_the_retry_of_a_refused_request_is_a_new_sample(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, numbered(), running=1) as app:
        gate = Gate(app.engines[0], 5)
        first = asyncio.create_task(post(app, PATHS[1], ASK))
        await until(lambda: app.session().running)
        assert (await post(app, PATHS[1], ASK)).status_code == 429
        gate.open.set()
        first_answer = (await first).content
        assert (await post(app, PATHS[1], ASK, **RETRY)).content != first_answer


async def test_an_answer_that_is_being_stored_when_its_client_leaves_waits_for_the_retry(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, numbered()) as app:
        stored, put = asyncio.Event(), app.sink.put
        storing = asyncio.Event()

        async def slow(record: Any, logged: Any) -> None:
            storing.set()
            await stored.wait()
            await put(record, logged)

        app.sink.put = slow  # type: ignore[method-assign]
        first = asyncio.create_task(post(app, PATHS[2], body(PATHS[2])))
        await storing.wait()
        first.cancel()
        await until(lambda: any(call.lost for call in calls(app)))
        again = asyncio.create_task(post(app, PATHS[2], body(PATHS[2])))
        await until(lambda: app.session().counts["attached"])
        stored.set()
        assert "candidate 1" in (await again).text
        assert words(app) == ["candidate 1"]


@pytest.mark.parametrize("text", ["", " ", "<think>\nHm.\n</think>\n\n"])
async def test_a_harness_that_got_nothing_to_use_gets_another_sample(proxy_tokenizer: Any, text: str) -> None:
    """Qwen Code asks again, with the same bytes, when an answer says nothing."""
    said = iter([text, "Done."])
    async with running_app(proxy_tokenizer, lambda _: next(said)) as app:
        await post(app, PATHS[1], ASK)
        await post(app, PATHS[1], ASK)
        assert words(app) == [text, "Done."]


def test_what_counts_as_saying_that_it_is_a_retry() -> None:
    assert not any(map(says_retry, ({}, {"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "²"})))
    assert all(map(says_retry, ({"x-stainless-retry-count": "2"}, {"idempotency-key": "k"})))


def test_lost_answers_are_claimed_one_by_one_the_oldest_first() -> None:
    repeats, asked = Repeats(), Asked(key=b"k", question=b"q", role="main")  # type: ignore[arg-type]
    lost = [ModelCall(TurnHead(id=f"{i}", model="m", created=0, prompt_tokens=1), asked) for i in range(2)]
    for call in lost:
        call.settling = True
        repeats.add(call)
    for call in lost:
        assert repeats.find(b"k", {}) is call
        call.delivered = True
    assert repeats.find(b"k", {}) is None
    assert repeats.find(b"k", RETRY) is lost[1]
    assert repeats.find(b"other", RETRY) is None
