"""Security of the HTTP routes: keys, bounds, and hundreds of bodies that no harness would send (issue 3, point 9)."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from proxy_app import App, running_app

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


def test_no_body_breaks_the_proxy_or_is_recorded_when_refused(proxy_tokenizer: Any) -> None:
    """Arbitrary JSON in the place of every part of a request: an answer or a 4xx in native shape, never a 5xx."""
    import asyncio

    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    anything = st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    )  # fmt: skip
    names = st.sampled_from(
        ["role", "content", "type", "text", "tool_calls", "tool_use_id", "input", "name", "function", "arguments",
         "id", "call_id", "output", "summary", "thinking", "tool_call_id"]
    )  # fmt: skip
    words = st.sampled_from(
        ["user", "assistant", "system", "tool", "text", "tool_use", "tool_result", "function", "function_call",
         "function_call_output", "reasoning", "message", "thinking", "{}", '{"a":1}', "input_text"]
    )  # fmt: skip
    part = st.dictionaries(names, words | anything, max_size=5)
    nested = st.dictionaries(names, words | anything | part | st.lists(part, max_size=3), max_size=5)
    fields = ["messages", "input", "tools", "system", "max_tokens", "stream", "metadata", "instructions", "model", "n"]
    bodies = st.dictionaries(
        st.sampled_from(fields), anything | nested | st.lists(nested, max_size=4), max_size=5
    )  # fmt: skip

    @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(bodies, st.sampled_from(PATHS), st.booleans(), st.binary(max_size=3))
    def check(body: dict[str, Any], path: str, complete: bool, junk: bytes) -> None:
        raw = json.dumps({**GOOD, **body} if complete else body).encode()
        if junk:
            raw = raw[:-1] + junk
        records = len(app.sink.records)
        response = loop.run_until_complete(client.post(app.access.path + path, content=raw, headers=app.headers))
        assert response.status_code < 500, (response.status_code, response.text, raw)
        if response.status_code >= 400:
            assert native(path, response.json())
            assert len(app.sink.records) == records

    loop = asyncio.new_event_loop()
    running = running_app(proxy_tokenizer, lambda prompt: "ok")
    app = loop.run_until_complete(running.__aenter__())
    client = client_of(app)
    try:
        check()
    finally:
        loop.run_until_complete(client.aclose())
        loop.run_until_complete(running.__aexit__(None, None, None))
        loop.close()
