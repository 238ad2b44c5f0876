"""Calls over HTTP under trouble: retries, lost clients, moved cells, failures, limits."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from proxy_app import App, plain_client, running_app
from proxy_fakes import ScriptedEngine, logprob, tool_call, until

from gyre.chat.render import RenderError
from gyre.core.errors import GyreError, InvariantViolation
from gyre.core.records import CallRecord
from gyre.proxy.base import SessionSpec
from gyre.proxy.session.log import LoggedCall
from gyre.trajectory.tree import TrajectoryTree

LONG = "abcdefghij" * 8
BODY = {"model": "m", "max_tokens": 500, "stream": True, "messages": [{"role": "user", "content": "go"}]}


def answer(prompt: str) -> str:
    return tool_call("ls", '{"path": "."}') if "tool please" in prompt else LONG


class Gate:
    """Holds an engine once it has produced `after` tokens of a call, until opened."""

    def __init__(self, engine: ScriptedEngine, after: int = 10) -> None:
        self.reached, self._open = asyncio.Event(), asyncio.Event()
        self._after = after
        engine.step = self._step

    def open(self) -> None:
        self._open.set()

    async def _step(self, done: int) -> None:
        if done >= self._after:
            self.reached.set()
            await self._open.wait()


async def post(app: App, body: dict[str, Any], path: str = "/v1/messages", **headers: str) -> httpx.Response:
    async with plain_client(timeout=20) as client:
        return await client.post(app.url + path, json=body, headers={**app.headers, **headers})


async def lines(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            yield line[7:]


def deltas(text: str) -> str:
    return "".join(part.split('"')[0] for part in text.split('"text":"')[1:])


async def test_text_leaves_while_it_is_produced(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, answer) as app:
        gate = Gate(app.engines[0])
        async with (
            plain_client(timeout=20) as client,
            client.stream("POST", app.url + "/v1/messages", json=BODY, headers=app.headers) as response,
        ):
            chunks = response.aiter_text()
            got = ""
            while deltas(got) != LONG[:10]:
                got += await anext(chunks)
            assert "message_stop" not in got
            assert app.sink.records == []
            gate.open()
            async for chunk in chunks:
                got += chunk
        assert deltas(got) == LONG
        assert got.rstrip().endswith('{"type":"message_stop"}')


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses"])
async def test_silence_is_filled_with_events_before_and_after_the_first_token(proxy_tokenizer: Any, path: str) -> None:
    body = {**BODY, "input": "go"}
    events = {"/v1/messages": "ping", "/v1/chat/completions": '"delta":{}', "/v1/responses": "response.in_progress"}
    for after in (0, 10):
        async with running_app(proxy_tokenizer, answer, keepalive_s=0.03) as app:
            gate = Gate(app.engines[0], after)
            async with (
                plain_client(timeout=20) as client,
                client.stream("POST", app.url + path, json=body, headers=app.headers) as response,
            ):
                assert response.status_code == 200
                got = ""
                async for chunk in response.aiter_text():
                    got += chunk
                    if got.count(events[path]) >= 4:
                        gate.open()
            assert len(app.sink.records) == 1
            assert "\n:" not in got, "comments do not count as life"


async def test_T15_a_drain_is_invisible_and_exact(proxy_tokenizer: Any) -> None:
    """The same call with and without a move: same bytes to the harness, same tokens and log-probs on record."""
    bodies: list[bytes] = []
    records: list[CallRecord] = []
    for move in (False, True):
        async with running_app(proxy_tokenizer, answer, cells=2) as app:
            app.router.set_routes([app.route(0)])
            gate = Gate(app.engines[0])
            running = asyncio.create_task(post(app, BODY))
            await gate.reached.wait()
            if move:
                app.router.set_routes([app.route(1)])
                report = await app.proxy.drain(0)
                assert (report.calls_in_flight, report.rerouted, report.failed) == (1, 1, 0)
            gate.open()
            bodies.append((await running).content)
            records.append(app.sink.records[0])
            stats = await app.proxy.stats()
            assert (stats.harness_errors_from_transitions, stats.prompt_mismatches, stats.calls_done) == (0, 0, 1)
    assert bodies[0] == bodies[1]
    assert records[0].output_ids == records[1].output_ids
    prompt = len(records[1].delta_ids)
    assert records[1].output_logprobs == [logprob(token, prompt + i) for i, token in enumerate(records[1].output_ids)]
    assert records[1].output_versions == [0] * 10 + [1] * (len(records[1].output_ids) - 10)
    assert records[1].cells == [0, 1]


async def test_a_call_survives_a_time_without_any_engine(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, answer, cells=2, keepalive_s=0.03) as app:
        app.router.set_routes([app.route(0)])
        gate = Gate(app.engines[0])
        running = asyncio.create_task(post(app, BODY))
        await gate.reached.wait()
        app.router.set_routes([])
        report = await app.proxy.drain(0)
        assert report.rerouted == 1
        await until(lambda: app.router.held)
        assert (await app.proxy.stats()).held == 1
        app.router.set_routes([app.route(1)])
        response = await running
        assert deltas(response.text) == LONG
        assert app.sink.records[0].cells == [0, 1]


async def test_holding_too_long_is_503_with_retry_after_before_the_first_byte(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, answer, hold_s=0.05) as app:
        app.router.set_routes([])
        response = await post(app, BODY)
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert response.json()["error"]["type"] == "overloaded_error"
        assert (await app.proxy.stats()).harness_errors_from_transitions == 1


async def test_another_agent_with_the_same_request_is_another_call(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, answer) as app:
        one, two = await asyncio.gather(
            post(app, BODY, **{"x-claude-code-agent-id": "a1"}), post(app, BODY, **{"x-claude-code-agent-id": "a2"})
        )
        assert one.status_code == two.status_code == 200
        assert sorted(record.agent_id for record in app.sink.records) == ["a1", "a2"]
        assert {record.role for record in app.sink.records} == {"sub-agent"}


async def test_T11_a_client_that_leaves_cancels_its_call_and_leaves_an_orphan(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, answer) as app:
        gate = Gate(app.engines[0])
        running = asyncio.create_task(post(app, BODY))
        await gate.reached.wait()
        running.cancel()
        await until(lambda: app.sink.records and app.engines[0].cancelled)
        (orphan,) = app.sink.records
        assert (orphan.trainable, orphan.finish, orphan.flags) == (False, "abort", ["orphan"])
        assert proxy_tokenizer.decode(orphan.output_ids) == LONG[:10]
        app.engines[0].step = None
        again = await post(app, BODY)
        assert deltas(again.text) == LONG
        assert len(app.engines[0].requests) == 2
        assert app.sink.records[1].trainable
        summary = await app.proxy.close_session("g0-0")
        assert (summary.calls, summary.orphans) == (1, 1)


@pytest.mark.parametrize("stream", [True, False])
async def test_T18_a_malformed_tool_call_is_text_and_trains(proxy_tokenizer: Any, stream: bool) -> None:
    spoken = 'Well.\n<tool_call>\n{"name": "ls", "arguments": {"path": \n</tool_call>'
    async with running_app(proxy_tokenizer, lambda prompt: spoken) as app:
        response = await post(app, {**BODY, "stream": stream})
        assert response.status_code == 200
        assert "tool_use" not in response.text
        assert "<tool_call>" in response.text
        (record,) = app.sink.records
        assert (record.trainable, record.flags) == (True, ["unparsed_tool_call"])
        assert proxy_tokenizer.decode(record.output_ids) == spoken + "<|im_end|>"


async def test_T11_a_call_that_fails_before_a_token_changes_nothing(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, answer) as app:
        await post(app, BODY)
        digest = app.session().tree.digest()
        follow_up = {**BODY, "messages": [*BODY["messages"], {"role": "assistant", "content": LONG},
                                          {"role": "user", "content": "more"}]}  # type: ignore[misc]  # fmt: skip
        app.engines[0].corrupt_prompt = True
        response = await post(app, follow_up)
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "api_error"
        assert app.session().tree.digest() == digest
        assert len(app.sink.records) == 1
        assert (await app.proxy.stats()).prompt_mismatches == 1
        app.engines[0].corrupt_prompt = False
        assert (await post(app, follow_up)).status_code == 200
        assert app.sink.records[1].parent == app.sink.records[0].call_id


@pytest.mark.parametrize(
    ("path", "messages"),
    [
        ("/v1/messages", [{"role": "user", "content": ""}]),
        ("/v1/messages/count_tokens", [{"role": "user", "content": [{"type": "text", "text": " "}]}]),
        ("/v1/chat/completions", [{"role": "assistant"}]),
    ],
)
async def test_a_request_that_says_nothing_is_invalid(
    proxy_tokenizer: Any, path: str, messages: list[dict[str, Any]]
) -> None:
    async with running_app(proxy_tokenizer, answer) as app:
        response = await post(app, {"model": "m", "max_tokens": 9, "messages": messages}, path)
        assert response.status_code == 400
        assert "blank" in response.json()["error"]["message"]
        assert (app.sink.records, app.engines[0].requests) == ([], [])


async def test_a_failure_after_the_first_byte_ends_the_stream_with_an_error(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, answer, hold_s=0.05) as app:
        gate = Gate(app.engines[0])
        running = asyncio.create_task(post(app, BODY))
        await gate.reached.wait()
        app.router.set_routes([])
        await app.proxy.drain(0)
        response = await running
        assert response.status_code == 200
        assert 'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"' in response.text
        assert [record.trainable for record in app.sink.records] == [False]


async def test_a_record_that_cannot_be_stored_ends_the_session(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, answer) as app:
        app.sink.fail = OSError("disk full")
        response = await post(app, {**BODY, "stream": False})
        assert response.status_code == 500
        assert (await post(app, {**BODY, "max_tokens": 7})).status_code == 410


async def test_back_pressure_is_429_with_retry_after(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, answer, running=1) as app:
        gate = Gate(app.engines[0])
        running = asyncio.create_task(post(app, BODY))
        await gate.reached.wait()
        for path, kind in (("/v1/messages", "rate_limit_error"), ("/v1/chat/completions", "rate_limit_error")):
            refused = await post(app, {**BODY, "max_tokens": 9}, path)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == kind
        gate.open()
        assert (await running).status_code == 200


async def test_closing_ends_running_calls_and_serves_no_more(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, answer) as app:
        gate = Gate(app.engines[0])
        running = asyncio.create_task(post(app, BODY))
        await gate.reached.wait()
        summary = await app.proxy.close_session("g0-0")
        assert (summary.calls, summary.orphans) == (0, 1)
        assert len(app.sink.records) == 1
        assert "event: error" in (await running).text
        late = await post(app, BODY)
        assert (late.status_code, late.json()["error"]["type"]) == (410, "invalid_request_error")
        assert await app.proxy.close_session("g0-0") == summary
        with pytest.raises(GyreError, match="has ended"):
            await app.proxy.open_session(SessionSpec(execution_id="g0-0", harness="fake"))


async def test_orphans_are_stored_when_the_session_closes_right_after_the_clients_left(proxy_tokenizer: Any) -> None:
    """A harness that is killed leaves and is closed at once: a record that others refer to must not get lost."""
    async with running_app(proxy_tokenizer, answer) as app:
        gate = Gate(app.engines[0])
        stored, put = asyncio.Event(), app.sink.put

        async def slow_put(record: CallRecord, logged: LoggedCall) -> None:
            await stored.wait()
            await put(record, logged)

        app.sink.put = slow_put  # type: ignore[method-assign]
        session = app.session()
        clients = [asyncio.create_task(post(app, {**BODY, "max_tokens": 400 + i})) for i in range(2)]
        await until(lambda: len(app.engines[0].requests) == 2)
        await gate.reached.wait()
        await until(lambda: session.running == 2)
        for client in clients:
            client.cancel()
        await until(lambda: session.counts["orphans"])
        closing = asyncio.create_task(app.proxy.close_session("g0-0"))
        await until(lambda: session.closed)
        stored.set()
        assert (await closing).orphans == len(app.sink.records) == 2
        assert TrajectoryTree.from_records(app.sink.records).digest


async def test_opening_twice_answers_the_same_access(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, answer) as app:
        assert await app.proxy.open_session(SessionSpec(execution_id="g0-0", harness="fake")) == app.access
        other = await app.proxy.open_session(SessionSpec(execution_id="g0-1", harness="fake"))
        assert other.path != app.access.path
        assert other.api_key != app.access.api_key


async def test_responses_items_are_done_only_when_recorded(proxy_tokenizer: Any) -> None:
    """Codex acts on output_item.done: the record must be there first."""
    async with running_app(proxy_tokenizer, answer) as app:
        stored, go_on = asyncio.Event(), asyncio.Event()
        put = app.sink.put

        async def slow_put(record: CallRecord, logged: LoggedCall) -> None:
            stored.set()
            await go_on.wait()
            await put(record, logged)

        app.sink.put = slow_put  # type: ignore[method-assign]
        body = {"model": "m", "input": "tool please", "stream": True}
        got: list[str] = []
        async with (
            plain_client(timeout=20) as client,
            client.stream("POST", app.url + "/v1/responses", json=body, headers=app.headers) as response,
        ):
            await stored.wait()
            go_on.set()
            async for event in lines(response):
                got.append(event)
                if event.endswith(".done") or event == "response.completed":
                    assert len(app.sink.records) == 1
        assert [event for event in got if event != "response.in_progress"] == [
            "response.created",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]


async def test_calls_of_one_execution_run_side_by_side(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, answer) as app:
        gate = Gate(app.engines[0], after=0)
        running = [
            asyncio.create_task(post(app, {**BODY, "messages": [{"role": "user", "content": f"agent {i}"}]}))
            for i in range(5)
        ]
        await until(lambda: len(app.engines[0].requests) == 5)
        gate.open()
        assert {deltas(response.text) for response in await asyncio.gather(*running)} == {LONG}
        assert sorted(record.seq for record in app.sink.records) == list(range(5))


async def test_the_summary_tells_whole_answers_from_cut_ones(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, answer) as app:
        await post(app, {**BODY, "max_tokens": 20})
        assert app.session()._service.last_answer == "cut"
        await post(app, BODY)
        await post(app, {**BODY, "model": "small-model"})
        summary = await app.proxy.close_session("g0-0")
        assert (summary.calls, summary.cut_answers, summary.last_answer) == (2, 1, "whole")
        assert (summary.failed_calls, summary.unserved) == ({}, 0)


async def test_the_summary_says_that_a_failed_call_was_made_good(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, answer, hold_s=0.05) as app:
        app.router.set_routes([])
        assert (await post(app, BODY)).status_code == 503
        assert app.session()._service.unserved == 1
        app.router.set_routes([app.route(0)])
        # In another form: it is the same question.
        assert (await post(app, {**BODY, "max_tokens": 400, "stream": False})).status_code == 200
        summary = await app.proxy.close_session("g0-0")
        assert (summary.failed_calls, summary.unserved, summary.last_answer) == ({"no_engine": 1}, 0, "whole")


async def test_the_summary_tells_an_outage_from_the_harness_s_own_errors(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, answer, max_context=300) as app:
        await post(app, BODY)
        too_long = {**BODY, "messages": [{"role": "user", "content": "x" * 300}]}
        assert (await post(app, too_long)).status_code == 400
        app.engines[0].fail = InvariantViolation("broken")
        for question in ("one", "two", "two"):
            asked = {**BODY, "messages": [{"role": "user", "content": question}]}
            assert (await post(app, asked)).status_code == 500
        summary = await app.proxy.close_session("g0-0")
        assert (summary.failed_calls, summary.unserved, summary.last_answer) == ({"error": 3}, 2, "failed")


@pytest.mark.parametrize("leaves", [True, False])
async def test_the_summary_counts_calls_that_waited_for_an_engine_in_vain(proxy_tokenizer: Any, leaves: bool) -> None:
    """The harness gave up, or its time was over."""
    async with running_app(proxy_tokenizer, answer) as app:
        app.router.set_routes([])
        waiting = asyncio.create_task(post(app, BODY))
        await until(lambda: app.router.held)
        if leaves:
            waiting.cancel()
            await until(lambda: not app.session().running)
        summary = await app.proxy.close_session("g0-0")
        assert (summary.failed_calls, summary.unserved, summary.last_answer) == ({"no_engine": 1}, 1, "failed")
        await asyncio.gather(waiting, return_exceptions=True)


async def test_a_client_that_leaves_a_working_engine_is_no_failure_of_the_platform(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, answer) as app:
        gate = Gate(app.engines[0])
        running = asyncio.create_task(post(app, BODY))
        await gate.reached.wait()
        running.cancel()
        await until(lambda: app.sink.records)
        summary = await app.proxy.close_session("g0-0")
        assert (summary.orphans, summary.failed_calls, summary.unserved, summary.last_answer) == (1, {}, 0, "none")


async def test_a_template_that_fails_is_the_platform_s_failure_and_final(
    proxy_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_app(proxy_tokenizer, answer) as app:
        digest = app.session().tree.digest()

        def fail(_: object) -> None:
            raise RenderError("The template failed.")

        monkeypatch.setattr(app.session().tree._renderer, "render", fail)
        response = await post(app, BODY)
        assert (response.status_code, response.headers["x-should-retry"]) == (500, "false")
        assert response.json()["error"]["message"] == "The template failed."
        assert app.session().tree.digest() == digest
        assert (await app.proxy.close_session("g0-0")).failed_calls == {"error": 1}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses"])
async def test_a_whole_answer_is_kept_alive_with_blanks(proxy_tokenizer: Any, path: str) -> None:
    async with running_app(proxy_tokenizer, answer, keepalive_s=0.03) as app:
        gate = Gate(app.engines[0])
        body = {**BODY, "stream": False, "input": "go"}
        async with (
            plain_client(timeout=20) as client,
            client.stream("POST", app.url + path, json=body, headers=app.headers) as response,
        ):
            assert response.status_code == 200
            got = ""
            async for chunk in response.aiter_text():
                got += chunk
                if len(got) >= 3:
                    gate.open()
        assert got.startswith("   ")
        assert LONG in str(json.loads(got))
        assert response.headers["content-type"] == "application/json"


async def test_a_whole_answer_that_fails_behind_its_first_blank_is_broken_off(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, answer, keepalive_s=0.03) as app:
        gate = Gate(app.engines[0])
        async with plain_client(timeout=20) as client:
            body = {**BODY, "stream": False}
            async with client.stream("POST", app.url + "/v1/messages", json=body, headers=app.headers) as response:
                chunks = response.aiter_text()
                assert await anext(chunks) == " "
                app.engines[0].fail, app.engines[0].fail_after = InvariantViolation("broken"), 0
                gate.open()
                with pytest.raises(httpx.RemoteProtocolError):
                    async for _ in chunks:
                        pass
        assert (await app.proxy.close_session("g0-0")).failed_calls == {"error": 1}
