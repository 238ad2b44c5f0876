"""Security of the HTTP routes: keys, bounds, and hundreds of bodies that no harness would send (issue 3, point 9)."""

import asyncio
import hashlib
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fuzz_bodies import REQUESTS, arbitrary, continued, damaged
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from proxy_app import App, running_app
from proxy_fakes import tool_call

from gyre.proxy.base import SessionSpec

PATHS = ["/v1/messages", "/v1/chat/completions", "/v1/responses", "/v1/messages/count_tokens"]
GOOD = {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": "x"}], "input": "x"}


def native(path: str, body: Any) -> bool:
    """The error has the shape of the API that was called."""
    if "messages" in path:
        return body["type"] == "error" and set(body["error"]) == {"type", "message"}
    return set(body["error"]) == {"message", "type", "param", "code"}


def client_of(app: App) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app.asgi), base_url="http://proxy")


@pytest.mark.parametrize("path", PATHS)
async def test_only_the_right_path_and_key_enter(proxy_tokenizer: Any, path: str) -> None:
    async with running_app(proxy_tokenizer, lambda prompt: "ok") as app, client_of(app) as client:
        other = await app.proxy.open_session(SessionSpec(execution_id="g0-1", harness="fake"))
        key = app.access.api_key
        refused: list[tuple[str, Any]] = [
            (app.access.path, {}),
            (app.access.path, {"x-api-key": other.api_key}),
            (app.access.path, {"x-api-key": key[:-1]}),
            (app.access.path, {"authorization": f"Basic {key}"}),
            (app.access.path, {"authorization": b"Bearer \xc3\xa9"}),
            (other.path, {"x-api-key": key}),
            (app.access.path[:-1], {"x-api-key": key}),
            ("/x/" + "0" * 32, {"x-api-key": key}),
            ("", {"x-api-key": key}),
            ("/x", {"x-api-key": key}),
        ]
        for base, headers in refused:
            response = await client.post(base + path, json=GOOD, headers=headers)
            assert response.status_code == 401, (base, headers)
            assert "error" in response.json()
        assert app.engines[0].requests == []
        for headers in ({"x-api-key": key}, {"authorization": f"Bearer {key}"}, {"authorization": f"bearer {key}"}):
            for spelled in (path, path.removeprefix("/v1"), path + "?beta=true"):
                assert (await client.post(app.access.path + spelled, json=GOOD, headers=headers)).status_code == 200


async def test_probes_and_unknown_routes(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, lambda prompt: "ok") as app, client_of(app) as client:
        for path in ("", "/", "/api/hello", "/v1"):
            assert (await client.head(app.access.path + path)).status_code == 200
        missing = await client.get(app.access.path + "/v1/files", headers=app.headers)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        assert (await client.get(app.access.path + "/v1/messages", headers=app.headers)).status_code == 404
        assert (await client.get(app.access.path + "/v1/models")).status_code == 401
        assert (await client.head("/")).status_code == 401


@pytest.mark.parametrize("path", PATHS)
async def test_bodies_are_bounded(proxy_tokenizer: Any, path: str) -> None:
    async def endless() -> Any:
        while True:
            yield b" " * 100_000

    async with running_app(proxy_tokenizer, lambda prompt: "ok") as app, client_of(app) as client:
        url = app.access.path + path
        for content in (b" " * (2**20 + 1), endless()):
            response = await client.post(url, content=content, headers=app.headers)
            assert response.status_code == 413
            assert native(path, response.json())


def _answer(prompt: str) -> str:
    """A word, a call or two calls, always the same for the same prompt."""
    calls = hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).digest()[0] % 3
    return "ok" + tool_call("f", '{"a": 1}') * calls


@pytest.fixture(scope="module")
def fuzzed(proxy_tokenizer: Any) -> Iterator["Fuzzed"]:
    loop = asyncio.new_event_loop()
    running = running_app(proxy_tokenizer, _answer)
    app = loop.run_until_complete(running.__aenter__())
    client = client_of(app)
    yield Fuzzed(app, client, loop)
    loop.run_until_complete(client.aclose())
    loop.run_until_complete(running.__aexit__(None, None, None))
    loop.close()


class Fuzzed:
    def __init__(self, app: App, client: httpx.AsyncClient, loop: asyncio.AbstractEventLoop) -> None:
        self.app, self.client, self.loop = app, client, loop

    def check(self, path: str, body: bytes, caplog: pytest.LogCaptureFixture) -> httpx.Response:
        """An answer, or a 4xx in the API's native shape with nothing recorded; never a 5xx, a traceback or a secret."""
        app, records = self.app, len(self.app.sink.records)
        digest = app.session().tree.digest()
        caplog.clear()
        response = self.loop.run_until_complete(
            self.client.post(app.access.path + path, content=body, headers=app.headers)
        )
        assert response.status_code < 500, (response.status_code, response.text, body)
        assert app.access.api_key not in response.text + caplog.text
        assert app.access.path not in response.text + caplog.text
        assert "Traceback" not in response.text + caplog.text
        if response.status_code >= 400:
            assert native(path, response.json()), response.text
            assert (len(app.sink.records), app.session().tree.digest()) == (records, digest)
        elif len(app.sink.records) > 200:
            self.loop.run_until_complete(self._renew())
        return response

    async def _renew(self) -> None:
        """A small tree, so that hashing it stays cheap."""
        await self.app.proxy.close_session(self.app.session_id)
        await self.app.open_another()
        self.app.sink.records.clear()


# Every test sends 100 bodies in CI, and 1,250 in `make fuzz` (profile "nightly").
ANY = settings(suppress_health_check=list(HealthCheck), database=None)
HISTORY = 4
"""Requests of one history."""


@pytest.mark.parametrize("path", PATHS)
@ANY
@given(body=arbitrary())
def test_no_body_breaks_the_proxy(fuzzed: Fuzzed, path: str, body: bytes, caplog: pytest.LogCaptureFixture) -> None:
    fuzzed.check(path, body, caplog)


@pytest.mark.parametrize("path", PATHS)
@ANY
@given(seed=st.integers(0, 2**64))
def test_no_damaged_request_breaks_the_proxy(
    fuzzed: Fuzzed, path: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    fuzzed.check(path, damaged(REQUESTS[path], random.Random(seed)), caplog)


@pytest.mark.parametrize("path", PATHS[:3])
@settings(ANY, max_examples=settings().max_examples // HISTORY)
@given(seed=st.integers(0, 2**64))
def test_no_damaged_history_breaks_the_proxy(
    fuzzed: Fuzzed, path: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Histories that repeat the policy's own turns, damaged around them: requests that do get an answer go on."""
    rng, request = random.Random(seed), REQUESTS[path]
    for _ in range(HISTORY):
        raw = damaged(request, rng)
        response = fuzzed.check(path, raw, caplog)
        if response.status_code == 200 and not response.text.startswith(("data:", "event:")):
            request = continued(json.loads(raw, parse_int=lambda digits: int(digits[:99])), response.json())


@pytest.mark.parametrize("path", PATHS)
def test_the_requests_that_are_damaged_are_valid(fuzzed: Fuzzed, path: str, caplog: pytest.LogCaptureFixture) -> None:
    response = fuzzed.loop.run_until_complete(
        fuzzed.client.post(fuzzed.app.access.path + path, json=REQUESTS[path], headers=fuzzed.app.headers)
    )
    assert response.status_code == 200, response.text
