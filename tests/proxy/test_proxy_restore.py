"""A worker that takes over from one that is gone: same doors, same trees, answers that may be asked for again."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from proxy_app import App, MemorySink, plain_client, running_app
from proxy_fakes import tool_call, until

from gyre.core.errors import ConfigError, GyreError
from gyre.core.records import CallRecord
from gyre.proxy.base import SessionSpec
from gyre.proxy.session.log import LoggedCall, SessionLog
from gyre.trajectory.tree import TrajectoryTree

TOOLS = [{"name": "bash", "description": "d", "input_schema": {"type": "object"}}]
SUB = {"x-claude-code-agent-id": "a1"}


class LoggingSink(MemorySink):
    """As the worker's: what is logged goes to the file."""

    def __init__(self, log: SessionLog) -> None:
        super().__init__()
        self._log = log

    async def put(self, record: CallRecord, logged: LoggedCall) -> None:
        self._log.add(record.execution_id, logged)
        await super().put(record, logged)


def says(prompt: str) -> str:
    newest = prompt.rsplit("<|im_start|>user", 1)[-1]
    if "result 3" in newest or "no tool" in newest:
        return "Done."
    thought = "<think>\nHm 10000.0\n</think>\n\n" if "think" in newest else ""
    return thought + "Look.\n" + tool_call("bash", '{"n": 10000.0, "big": 12345678901234567890, "x": "é"}')


@asynccontextmanager
async def worker(tokenizer: Any, log: SessionLog, before: App | None = None, **settings: Any) -> AsyncIterator[App]:
    """A worker with a log. `before`: the one that is gone; its records are the store's."""
    async with running_app(tokenizer, says, **settings) as app:
        app.sink = LoggingSink(log)
        app.proxy._services = app.services = _with_sink(app)
        app.proxy._log = log
        app.proxy._sessions.clear()
        if before is None:
            app.access = await app.proxy.open_session(SessionSpec(execution_id="g0-0", harness="fake"))
        else:
            records = [*before.sink.records]
            app.sink.records += records
            await app.proxy.restore(
                app.proxy.take_over(), lambda execution_id: [r for r in records if r.execution_id == execution_id]
            )
            app.access = before.access
        await app.proxy.set_routes([app.route(cell) for cell in app.engines])
        yield app


def _with_sink(app: App) -> Any:
    return msgspec.structs.replace(app.proxy._services, sink=app.sink)


async def post(app: App, body: dict[str, Any], **headers: str) -> httpx.Response:
    async with plain_client(timeout=20) as client:
        return await client.post(app.url + "/v1/messages", json=body, headers={**app.headers, **headers})


class Agent:
    """A harness that spells what it echoes as JavaScript does."""

    def __init__(self, task: str, **headers: str) -> None:
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": task}]
        self.headers = headers
        self.turns = 0

    @property
    def body(self) -> dict[str, Any]:
        return {"model": "m", "max_tokens": 900, "system": "S", "tools": TOOLS, "messages": self.messages}

    async def turn(self, app: App) -> None:
        answer = await post(app, self.body, **self.headers)
        assert answer.status_code == 200, answer.text
        self.take(answer.json()["content"])

    def take(self, content: list[dict[str, Any]]) -> None:
        self.turns += 1
        content = json.loads(json.dumps(content).replace("10000.0", "10000"))
        uses = [block for block in content if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use["id"], "content": f"result {self.turns}"} for use in uses]
        self.messages += [{"role": "assistant", "content": content}, {"role": "user", "content": results or "more"}]


async def talk(app: App) -> list[Agent]:
    """Two agents, one of which goes two ways, an orphan, an edited turn and two samples of one request."""
    main, sub = Agent("think first"), Agent("sub task", **SUB)
    for agent in (main, sub, main, sub):
        await agent.turn(app)
    other = Agent("think first")
    other.messages = [*main.messages[:2], {"role": "user", "content": "no tool"}]
    await other.turn(app)
    await post(app, other.body)
    edited = Agent("")
    edited.messages = [*main.messages]
    edited.messages[1] = {"role": "assistant", "content": [{"type": "text", "text": "[cleared]"}]}
    edited.messages[2] = {"role": "user", "content": "no tool"}
    await edited.turn(app)
    reached = asyncio.Event()

    async def hold(done: int) -> None:
        if done >= 10:
            reached.set()
            await asyncio.Event().wait()

    app.engines[0].step = hold
    lost = asyncio.create_task(post(app, Agent("an orphan").body))
    await reached.wait()
    lost.cancel()
    await until(lambda: app.session("g0-0").counts["orphans"])
    app.engines[0].step = None
    return [main, sub, other, edited]


async def test_a_restored_session_is_the_session(proxy_tokenizer: Any, tmp_path: Path) -> None:
    log = SessionLog(tmp_path / "log")
    async with worker(proxy_tokenizer, log) as one:
        agents = await talk(one)
        session = one.session("g0-0")
        async with worker(proxy_tokenizer, SessionLog(tmp_path / "log"), one) as two:
            again = two.session("g0-0")
            assert again.tree.digest() == session.tree.digest()
            kept = ("calls", "orphans")
            assert [again.counts[name] for name in kept] == [session.counts[name] for name in kept]
            assert (again._drift, again._versions) == (session._drift, session._versions)
            assert (again._callers, again._main_system) == (session._callers, session._main_system)
            assert two.access == one.access
            for agent in agents:
                # The same bytes to the engine, at the same place of the tree.
                await agent.turn(two)
                sent = [*two.engines[0].requests[-1].input_ids]
                record = two.sink.records[-1]
                assert "prefix_break" not in record.flags
                tree = TrajectoryTree.from_records(two.sink.records)
                assert tree.path_ids(record.call_id)[: len(sent)] == sent
            await two.proxy.close_session("g0-0")
        third = SessionLog(tmp_path / "log")
        assert third.sessions()[0].summary == two.proxy._summaries["g0-0"]
        assert third.calls("g0-0") == []


async def test_both_workers_send_engines_the_same_next_prompt(proxy_tokenizer: Any, tmp_path: Path) -> None:
    log = SessionLog(tmp_path / "log")
    async with worker(proxy_tokenizer, log) as one:
        (main, sub, *_) = await talk(one)
        sink = [*one.sink.records]
        prompts = []
        for app_of in (None, one):
            if app_of is None:
                async with worker(proxy_tokenizer, SessionLog(tmp_path / "log"), one) as two:
                    for agent in (main, sub):
                        await post(two, agent.body, **agent.headers)
                    prompts.append([[*request.input_ids] for request in two.engines[0].requests])
                    cleared = [(r.parent, r.prefix_len, r.drift) for r in two.sink.records[len(sink) :]]
            else:
                before = len(one.engines[0].requests)
                one.sink.put = MemorySink().put  # type: ignore[method-assign]
                for agent in (main, sub):
                    await post(one, agent.body, **agent.headers)
                prompts.append([[*request.input_ids] for request in one.engines[0].requests[before:]])
        assert prompts[0] == prompts[1]
        assert all(parent is not None for parent, _, _ in cleared)


async def test_an_answer_that_was_not_delivered_is_replayed_and_a_delivered_one_is_not(
    proxy_tokenizer: Any, tmp_path: Path
) -> None:
    log = SessionLog(tmp_path / "log")
    async with worker(proxy_tokenizer, log) as one:
        first, second = Agent("no tool, 1"), Agent("no tool, 2")
        got = (await post(one, first.body)).json()
        lost = (await post(one, second.body)).json()
        async with worker(proxy_tokenizer, SessionLog(tmp_path / "log"), one) as two:
            # The second worker cannot know that the latest answer arrived.
            assert (await post(two, second.body)).json() == lost
            assert (await post(two, second.body)).json()["id"] != lost["id"]
            # The log of the second call told of the first one's delivery.
            fresh = (await post(two, first.body)).json()
            assert fresh["id"] not in (got["id"], lost["id"])
            assert (await post(two, first.body, **{"x-stainless-retry-count": "1"})).json() == fresh
            ids = [record.call_id for record in two.sink.records]
            assert len(set(ids)) == len(ids) == 4
            assert len({call_id.rpartition("_")[0] for call_id in ids}) == 2


async def test_requests_wait_until_their_session_is_restored(proxy_tokenizer: Any, tmp_path: Path) -> None:
    log = SessionLog(tmp_path / "log")
    async with worker(proxy_tokenizer, log) as one:
        agent = Agent("think")
        await agent.turn(one)
        session = one.session("g0-0")
        session.restoring()
        waiting = asyncio.create_task(post(one, agent.body))
        closing = asyncio.create_task(one.proxy.close_session("g0-0"))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not waiting.done()
        assert not closing.done()
        session.restore([*one.sink.records], log.calls("g0-0"), 2)
        await closing
        assert (await waiting).status_code in (200, 410)


async def test_ended_executions_stay_ended(proxy_tokenizer: Any, tmp_path: Path) -> None:
    log = SessionLog(tmp_path / "log")
    async with worker(proxy_tokenizer, log) as one:
        await Agent("think").turn(one)
        summary = await one.proxy.close_session("g0-0")
        async with worker(proxy_tokenizer, SessionLog(tmp_path / "log"), one) as two:
            assert await two.proxy.close_session("g0-0") == summary
            with pytest.raises(GyreError, match="has ended"):
                await two.proxy.open_session(SessionSpec(execution_id="g0-0", harness="fake"))
            assert (await post(two, Agent("think").body)).status_code == 410


async def test_a_call_that_was_logged_and_not_recorded_counts_for_nothing(proxy_tokenizer: Any, tmp_path: Path) -> None:
    log = SessionLog(tmp_path / "log")
    async with worker(proxy_tokenizer, log) as one:
        agent = Agent("think")
        await agent.turn(one)
        digest = one.session("g0-0").tree.digest()
        await agent.turn(one)
        one.sink.records.pop()
        async with worker(proxy_tokenizer, SessionLog(tmp_path / "log"), one) as two:
            assert len(two.session("g0-0").tree) == 1
            assert two.session("g0-0").tree.digest() == digest
            agent.messages = agent.messages[:3]
            await agent.turn(two)


async def test_a_session_whose_records_are_damaged_is_lost_alone(proxy_tokenizer: Any, tmp_path: Path) -> None:
    log = SessionLog(tmp_path / "log")
    async with worker(proxy_tokenizer, log) as one:
        await Agent("think").turn(one)
        broken = one.access
        one.access = healthy = await one.proxy.open_session(SessionSpec(execution_id="g0-1", harness="fake"))
        agent = Agent("think")
        await agent.turn(one)
        await agent.turn(one)
        one.sink.records[:] = [msgspec.structs.replace(one.sink.records[0], prefix_len=7), *one.sink.records[1:]]
        async with worker(proxy_tokenizer, SessionLog(tmp_path / "log"), one) as two:
            two.access = healthy
            await agent.turn(two)
            two.access = broken
            assert (await post(two, Agent("think").body)).status_code == 410
            assert (await two.proxy.close_session("g0-0")).calls == 0


def test_only_the_owner_reads_the_log_which_holds_keys(tmp_path: Path) -> None:
    SessionLog(tmp_path / "sessions" / "log").close()
    assert (tmp_path / "sessions" / "log").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "sessions").stat().st_mode & 0o777 == 0o700
    (tmp_path / "broken").write_text("no database, and long enough to be read as one" * 9)
    with pytest.raises(ConfigError, match="cannot keep its sessions"):
        SessionLog(tmp_path / "broken")
