"""Forms of requests: null for absent, texts with a source, tools of one name in several namespaces (issue 13)."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from proxy_app import plain_client, running_app
from proxy_fakes import tool_call

from gyre.chat.conversation import Message, ToolCall
from gyre.proxy.dialects import DIALECTS
from gyre.proxy.dialects.base import ToolForm, WireRequest
from gyre.proxy.dialects.memo import Memo
from gyre.proxy.errors import CallError, Fault

U = {"role": "user", "content": "go"}


def read(dialect: str, body: dict[str, Any]) -> WireRequest:
    return DIALECTS[dialect].read(msgspec.json.encode(body), {}, Memo())


def namespace(name: str, *tools: str, kind: str = "function") -> dict[str, Any]:
    return {"type": "namespace", "name": name, "tools": [{"type": kind, "name": tool} for tool in tools]}


def test_tools_of_one_name_in_several_namespaces_have_names_of_their_own() -> None:
    tools = [
        {"type": "function", "name": "search"},
        namespace("mcp__alpha", "search", "only_here"),
        namespace("mcp__beta__", "search"),
        {"type": "function", "name": "mcp__alpha__search"},
    ]
    wire = read("responses", {"input": "x", "tools": tools})
    names = ["search", "mcp__alpha__search_2", "only_here", "mcp__beta__search", "mcp__alpha__search"]
    assert [tool.name for tool in wire.conversation.tools] == names
    assert wire.facts.tool_forms == {
        "mcp__alpha__search_2": ToolForm("search", "mcp__alpha"),
        "only_here": ToolForm("only_here", "mcp__alpha"),
        "mcp__beta__search": ToolForm("search", "mcp__beta__"),
    }


@pytest.mark.parametrize("kind", ["function", "custom"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("server", ["alpha", "beta"])
async def test_a_call_is_routed_to_its_own_namespace_and_echoed_without_drift(
    proxy_tokenizer: Any, kind: str, stream: bool, server: str
) -> None:
    tools = [namespace("alpha", "search", kind=kind), namespace("beta", "search", kind=kind)]
    said = iter([tool_call(f"{server}__search", '{"input": "x"}'), "Done."])
    async with running_app(proxy_tokenizer, lambda _: next(said)) as app, plain_client(timeout=20) as client:

        async def ask(*items: Any) -> list[dict[str, Any]]:
            body = {"model": "m", "input": [U, *items], "tools": tools, "stream": stream}
            got = await client.post(app.url + "/v1/responses", json=body, headers=app.headers)
            events = [json.loads(line[6:]) for line in got.text.splitlines() if line.startswith("data: ")]
            output: list[dict[str, Any]] = (events[-1]["response"] if stream else got.json())["output"]
            return output

        (item,) = await ask()
        assert (item["namespace"], item["name"]) == (server, "search")
        await ask(item, {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "found"})
        first, second = app.sink.records
        assert (second.parent, second.drift, second.flags) == (first.call_id, {}, [])
        prompt = app.script.prompts[0]
        assert '"name": "alpha__search"' in prompt
        assert '"name": "beta__search"' in prompt


SOURCES: dict[str, tuple[dict[str, Any], str]] = {
    "document, text": (
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "PLAN"}, "title": "T"},
        "T\nPLAN",
    ),
    "document, content": (
        {
            "type": "document",
            "source": {"type": "content", "content": [{"type": "text", "text": "A"}, {"type": "image"}]},
            "title": None,
            "context": "C",
        },
        "C\nA\n[image omitted]",
    ),
    "document, one text": ({"type": "document", "source": {"type": "content", "content": "PLAN"}}, "PLAN"),
    "document, not text": (
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aa"}},
        "[document omitted]",
    ),
    "document, elsewhere": ({"type": "document", "source": {"type": "url", "url": "u"}}, "[document omitted]"),
    "search_result": (
        {"type": "search_result", "source": "s", "title": "T", "content": [{"type": "text", "text": "FOUND"}]},
        "T\ns\nFOUND",
    ),
}


@pytest.mark.parametrize("form", SOURCES)
@pytest.mark.parametrize("inside", ["user", "result"])
def test_text_that_has_a_source_reaches_the_policy(form: str, inside: str) -> None:
    block, text = SOURCES[form]
    content = [block] if inside == "user" else [{"type": "tool_result", "tool_use_id": "t", "content": [block]}]
    wire = read("anthropic", {"messages": [{"role": "user", "content": content}]})
    assert [message.text for message in wire.conversation.messages] == [text]


@pytest.mark.parametrize("dialect", ["chat", "responses"])
@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("data:text/x-python;base64," + base64.b64encode("é = 1".encode()).decode(), "a.py\né = 1"),
        ("data:application/pdf;base64,aaaa", "[{} omitted]"),
        ("data:text/plain;base64,!", "[{} omitted]"),
        (None, "[{} omitted]"),
    ],
)
def test_an_attached_text_file_reaches_the_policy(dialect: str, data: str | None, text: str) -> None:
    file = {"file_data": data, "filename": "a.py"}
    part = {"type": "file", "file": file} if dialect == "chat" else {"type": "input_file", **file}
    message = {"role": "user", "content": [part]}
    wire = read(dialect, {"messages": [message]} if dialect == "chat" else {"input": [message]})
    assert [message.text for message in wire.conversation.messages] == [text.format(part["type"])]


FULL: dict[str, dict[str, Any]] = {
    "anthropic": {
        "model": "m", "max_tokens": 9, "system": [{"type": "text", "text": "S", "cache_control": None}],
        "stream": False, "metadata": {}, "temperature": 1.0,
        "tools": [{"name": "t", "description": "d", "input_schema": {"type": "object"}, "type": "custom"}],
        "messages": [
            U,
            {"role": "assistant", "content": [
                {"type": "text", "text": "a", "citations": []}, {"type": "thinking", "thinking": "h", "signature": "s"},
                {"type": "tool_use", "id": "c", "name": "t", "input": {"keep": None}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "r"}]},
                {"type": "document", "source": {"type": "text", "data": "D"}, "title": "T", "context": "C"},
                {"type": "search_result", "source": "s", "title": "T", "content": []}]},
        ],
    },
    "chat": {
        "model": "m", "max_tokens": 9, "max_completion_tokens": 9, "stream": False, "n": 1, "metadata": {},
        "stream_options": {"include_usage": True}, "functions": [], "tool_choice": "auto",
        "tools": [{"type": "function", "function": {"name": "t", "description": "d", "parameters": {}}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x", "refusal": ""}]},
            {"role": "assistant", "content": "a", "reasoning_content": "h", "reasoning": "h", "refusal": "no",
             "function_call": None, "tool_call_id": "",
             "tool_calls": [{"id": "c", "type": "function", "function": {"name": "t", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "r"},
        ],
    },
    "responses": {
        "model": "m", "max_output_tokens": 9, "instructions": "I", "stream": False, "metadata": {},
        "client_metadata": {}, "previous_response_id": None, "conversation": None, "prompt": None, "reasoning": {},
        "tools": [{"type": "function", "name": "t", "description": "d", "parameters": {}},
                  {"type": "namespace", "name": "n", "tools": []}],
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "h"}], "content": []},
            {"type": "function_call", "name": "t", "namespace": "n", "call_id": "c", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "o"},
            {"type": "custom_tool_call", "name": "p", "call_id": "d", "input": "i"},
        ],
    },
}  # fmt: skip
"""Every field that is read, once."""
REQUIRED = {"messages", "input", "role", "type", "name", "function"}
"""Null is no request, speaker, kind or function."""
DATA = {"input_schema", "parameters", "keep"}
"""What a schema or the policy says: null is a value there."""


def fields(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        for name, item in value.items():
            if name not in DATA:
                yield (*path, name)
                yield from fields(item, (*path, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from fields(item, (*path, index))


def changed(body: Any, path: tuple[Any, ...], *, absent: bool) -> Any:
    copy = json.loads(json.dumps(body))
    at = copy
    for step in path[:-1]:
        at = at[step]
    if absent:
        del at[path[-1]]
    else:
        at[path[-1]] = None
    return copy


NULLS = [(dialect, path) for dialect, body in FULL.items() for path in fields(body) if path[-1] not in REQUIRED]


@pytest.mark.parametrize(("dialect", "path"), NULLS, ids=[".".join(map(str, (d, *path))) for d, path in NULLS])
def test_null_is_as_if_absent(dialect: str, path: tuple[Any, ...]) -> None:
    null, absent = (read(dialect, changed(FULL[dialect], path, absent=absent)) for absent in (False, True))
    assert null.conversation == absent.conversation
    assert null.facts == absent.facts
    assert null.wishes == absent.wishes


@pytest.mark.parametrize("dialect", FULL)
def test_null_in_the_place_of_a_request_is_refused_in_the_api_s_form(dialect: str) -> None:
    with pytest.raises(CallError) as refused:
        read(dialect, {**FULL[dialect], "messages": None, "input": None})
    assert refused.value.fault is Fault.INVALID


def test_null_inside_arguments_is_the_policy_s() -> None:
    wire = read("anthropic", FULL["anthropic"])
    assert wire.conversation.messages[2].tool_calls[0].arguments == {"keep": None}


def test_arguments_that_are_an_object_and_thoughts_in_the_content_are_understood() -> None:
    def request(arguments: Any) -> dict[str, Any]:
        call = {"id": "c", "function": {"name": "t", "arguments": arguments}}
        content = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]
        return {"messages": [U, {"role": "assistant", "content": content, "tool_calls": [call]}]}

    expected = Message(role="assistant", text="a", reasoning="hm", tool_calls=(ToolCall("c", "t", {"x": None}),))
    assert read("chat", request({"x": None})).conversation.messages[1] == expected
    deep: dict[str, Any] = {}
    for _ in range(70):
        deep = {"a": deep}
    with pytest.raises(CallError, match="nested deeper"):
        read("chat", request(deep))


BOUNDS = {"anthropic": "max_tokens", "chat": "max_completion_tokens", "responses": "max_output_tokens"}


@pytest.mark.parametrize("dialect", BOUNDS)
def test_the_bound_on_an_answer_is_at_least_one(dialect: str) -> None:
    body: dict[str, Any] = {"input": [U]} if dialect == "responses" else {"messages": [U]}
    assert read(dialect, {**body, BOUNDS[dialect]: 1}).facts.max_tokens == 1
    for wrong in (0, -1):
        with pytest.raises(CallError, match="at least 1"):
            read(dialect, {**body, BOUNDS[dialect]: wrong})


def test_a_responses_request_is_as_long_as_all_that_it_says() -> None:
    """Instructions, items and tools: what cannot fit is refused by it without being rendered."""
    tools = [{"type": "function", "name": "f", "description": "d" * 1000}]
    base = read("responses", {"input": "x"}).size
    assert read("responses", {"input": "x" * 501}).size == base + 500
    assert read("responses", {"input": "x", "instructions": "i" * 500}).size == base + 500
    assert read("responses", {"input": "x", "tools": tools}).size > base + 1000
    items = [{"role": "user", "content": "y" * 400}, {"role": "user", "content": "z" * 400}]
    assert read("responses", {"input": items}).size > 800


async def test_a_custom_tool_s_call_without_a_text_input_is_sent_as_it_was_written(proxy_tokenizer: Any) -> None:
    tools = [{"type": "custom", "name": "patch"}]
    for said, sent in (('{"input": "+x"}', "+x"), ('{"input": 7}', '{"input":7}'), ('{"other": "x"}', '{"other":"x"}')):
        async with (
            running_app(proxy_tokenizer, lambda _, said=said: tool_call("patch", said)) as app,
            plain_client(timeout=20) as client,
        ):
            body = {"model": "m", "input": "go", "tools": tools}
            got = await client.post(app.url + "/v1/responses", json=body, headers=app.headers)
            (item,) = got.json()["output"]
            assert (item["type"], item["input"]) == ("custom_tool_call", sent)
            assert "arguments" not in item


async def test_a_responses_stream_that_fails_says_so_in_its_own_form(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, lambda _: "a long answer", hold_s=0.05) as app:
        reached = False

        async def step(done: int) -> None:
            nonlocal reached
            if done >= 5:
                reached = True
                app.router.set_routes([])
                await app.engines[0].abort("")

        app.engines[0].step = step
        async with plain_client(timeout=20) as client:
            body = {"model": "m", "input": "go", "stream": True}
            got = await client.post(app.url + "/v1/responses", json=body, headers=app.headers)
        assert reached
        last = json.loads(got.text.rstrip().rsplit("data: ", 1)[1])
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"]["code"] == "server_is_overloaded"
        assert "No engine admitted" in last["response"]["error"]["message"]
