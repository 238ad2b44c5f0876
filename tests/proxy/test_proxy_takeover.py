"""SIGKILL of a real proxy worker under a client that only repeats what failed (issue 16, point 3)."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from proxy_fakes import Script, ScriptedEngine, tool_call
from proxy_worker_runs import Killable, killable_worker

from gyre.core.records import SessionAccess
from gyre.trajectory.tree import TrajectoryTree

pytestmark = pytest.mark.live

TOOLS = [{"name": "bash", "input_schema": {"type": "object"}}]


def says(prompt: str) -> str:
    newest = prompt.rsplit("<|im_start|>user", 1)[-1]
    return "Done." if "result 3" in newest else "Look.\n" + tool_call("bash", '{"n": 1.0}')


class Client:
    """Sends a request until it is answered."""

    def __init__(self, access: SessionAccess) -> None:
        self.access = access
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
        self.failed = 0

    async def ask(self) -> dict[str, Any]:
        body = {"model": "m", "max_tokens": 900, "tools": TOOLS, "messages": self.messages}
        transport = httpx.AsyncHTTPTransport(uds=self.access.socket)
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy", timeout=60) as client:
            while True:
                try:
                    answer = await client.post(
                        self.access.path + "/v1/messages", json=body, headers={"x-api-key": self.access.api_key}
                    )
                except httpx.TransportError:
                    self.failed += 1
                    await asyncio.sleep(0.05)
                    continue
                assert answer.status_code == 200, answer.text
                got: dict[str, Any] = answer.json()
                return got

    def take(self, answer: dict[str, Any], number: int) -> None:
        uses = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use, "content": f"result {number}"} for use in uses]
        self.messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]


async def replaced(worker: Killable) -> None:
    await worker.kill()
    await worker.start()


async def test_an_execution_outlives_its_worker_at_every_point_of_a_call(proxy_tokenizer: Any, tmp_path: Path) -> None:
    engine = ScriptedEngine(Script(proxy_tokenizer, says))
    async with killable_worker(proxy_tokenizer, tmp_path, engine) as worker:
        client = Client(await worker.open("g0-0", "claude_code"))
        # Between two calls.
        client.take(await client.ask(), 1)
        await replaced(worker)
        client.take(await client.ask(), 2)
        # While the policy writes.
        reached = asyncio.Event()

        async def hold(done: int) -> None:
            if done >= 10 and not reached.is_set():
                reached.set()
                await asyncio.Event().wait()

        engine.step = hold
        asking = asyncio.create_task(client.ask())
        await reached.wait()
        await replaced(worker)
        third = await asking
        assert client.failed
        # Behind a whole answer of which the new worker cannot know that it arrived: no new sample for its repeat.
        requests = len(engine.requests)
        await replaced(worker)
        assert await client.ask() == third
        assert len(engine.requests) == requests
        client.take(third, 3)
        assert (await client.ask())["content"] == [{"type": "text", "text": "Done."}]
        # The controller may ask again, and what has ended stays so.
        summary = await worker.control.close_session("g0-0")
        await replaced(worker)
        assert await worker.control.close_session("g0-0") == summary

        records = worker.records("g0-0")
        assert summary.calls == len(records) == 4
        assert (await worker.control.stats()).sessions == 0
    tree = TrajectoryTree.from_records(records)
    assert len(tree.leaves()) == 1, "one exact path"
    sent = [[*request.input_ids] for request in engine.requests]
    for record in records:
        assert record.drift == {}
        assert tree.path_ids(record.call_id)[: -len(record.output_ids)] in sent
