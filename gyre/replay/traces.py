"""Reads recorded traffic: one HTTP exchange of a harness per line (docs/harnesses.md).

A recorded answer becomes what the policy said: text, reasoning and calls, and whether the harness got all of it.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gyre.core.errors import ConfigError

Json = dict[str, Any]

DIALECT_PATHS = {"/messages": "anthropic", "/chat/completions": "chat", "/responses": "responses"}

_SAME_TOOLS = re.compile(r"same \d+ tools as seq (\d+)")


class AnsweredCall(msgspec.Struct):
    id: str
    name: str
    arguments: str
    """As the policy wrote them."""


class RecordedAnswer(msgspec.Struct):
    text: str = ""
    reasoning: str = ""
    calls: list[AnsweredCall] = []
    complete: bool = False
    """False when the connection ended first: the call was abandoned."""


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    seq: int
    dialect: str
    headers: dict[str, str]
    request: Json
    answer: RecordedAnswer | None
    """None when an error status was answered: nothing was sampled."""


class _Line(msgspec.Struct):
    seq: int
    path: str
    headers: dict[str, str]
    request: Json
    response: Json | list[Json | str] | None
    client_gone_at: float | None = None


def read_trace(path: Path) -> Iterator[Exchange]:
    """Exchanges in order. Raises ConfigError naming the line that is not one, or the file that cannot be read."""
    tools: dict[int, Any] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); name a file of recorded exchanges.") from error
    for number, line in enumerate(lines, start=1):
        try:
            entry = msgspec.json.decode(line, type=_Line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(f"{path}:{number} is not a recorded exchange ({error}).") from error
        route = entry.path.partition("?")[0]
        dialect = next((name for ending, name in DIALECT_PATHS.items() if route.endswith(ending)), None)
        if dialect is None:
            raise ConfigError(f"{path}:{number} calls {entry.path}, which is no route of a model API.")
        offered = entry.request.get("tools")
        try:
            if isinstance(offered, str) and (found := _SAME_TOOLS.search(offered)):
                offered = entry.request["tools"] = tools[int(found[1])]
            answer = read_answer(dialect, entry.response)
        except (AttributeError, LookupError, TypeError, msgspec.ValidationError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"{path}:{number} has tools or an answer that {dialect} does not know ({problem})."
            ) from error
        tools[entry.seq] = offered
        if answer is not None and entry.client_gone_at is not None:
            answer.complete = False
        yield Exchange(seq=entry.seq, dialect=dialect, headers=entry.headers, request=entry.request, answer=answer)


def read_answer(dialect: str, response: Json | list[Json | str] | None) -> RecordedAnswer | None:
    """Raises ValidationError, AttributeError, LookupError or TypeError when it is none of the dialect."""
    if isinstance(response, dict) and "_status" in response:
        return None
    if response is None or (isinstance(response, dict) and "_drop" in response):
        return RecordedAnswer()
    if isinstance(response, dict):
        answer = _WHOLE[dialect](response)
    else:
        answer = _STREAMED[dialect]([event for event in response if isinstance(event, dict)])
    # A Struct's constructor takes anything; `convert` does not.
    return msgspec.convert(msgspec.to_builtins(answer), RecordedAnswer)


def _anthropic_whole(body: Json) -> RecordedAnswer:
    answer = RecordedAnswer(complete=True)
    for block in body["content"]:
        if block["type"] == "tool_use":
            arguments = msgspec.json.encode(block["input"]).decode()
            answer.calls.append(AnsweredCall(block["id"], block["name"], arguments))
        elif block["type"] == "text":
            answer.text += block["text"]
        elif block["type"] == "thinking":
            answer.reasoning += block["thinking"]
    return answer


def _anthropic_stream(events: list[Json]) -> RecordedAnswer:
    """Claude Code keeps a turn whose blocks are all closed, whatever follows."""
    answer = RecordedAnswer()
    open_blocks: set[int] = set()
    for event in events:
        if event.get("type") == "content_block_start":
            open_blocks.add(event["index"])
            answer.complete = False
            block = event["content_block"]
            if block["type"] == "tool_use":
                answer.calls.append(AnsweredCall(block["id"], block["name"], ""))
            answer.text += block.get("text", "")
        elif event.get("type") == "content_block_delta":
            delta = event["delta"]
            answer.text += delta.get("text", "")
            answer.reasoning += delta.get("thinking", "")
            if "partial_json" in delta:
                answer.calls[-1].arguments += delta["partial_json"]
        elif event.get("type") == "content_block_stop":
            open_blocks.discard(event["index"])
            answer.complete = not open_blocks
        elif event.get("type") == "message_stop":
            answer.complete = True
        elif event.get("type") == "error":
            answer.complete = False
    return answer


def _chat_whole(body: Json) -> RecordedAnswer:
    message = body["choices"][0]["message"]
    calls = [
        AnsweredCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or []
    ]
    reasoning = message.get("reasoning_content") or ""
    return RecordedAnswer(message.get("content") or "", reasoning, calls, complete=True)


def _chat_stream(events: list[Json]) -> RecordedAnswer:
    answer = RecordedAnswer()
    calls: dict[int, AnsweredCall] = {}
    for choice in (choice for event in events for choice in event.get("choices", [])):
        delta = choice["delta"]
        answer.text += delta.get("content") or ""
        answer.reasoning += delta.get("reasoning_content") or ""
        for part in delta.get("tool_calls") or []:
            call = calls.setdefault(part["index"], AnsweredCall("", "", ""))
            function: Mapping[str, str] = part.get("function", {})
            call.id += part.get("id", "")
            call.name += function.get("name", "")
            call.arguments += function.get("arguments", "")
        answer.complete |= choice.get("finish_reason") is not None
    answer.calls = list(calls.values())
    return answer


def _responses_items(items: list[Json]) -> RecordedAnswer:
    answer = RecordedAnswer(complete=True)
    for item in items:
        if item["type"] == "message":
            answer.text += "".join(part.get("text", "") for part in item["content"])
        elif item["type"] == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            answer.reasoning += "".join(part.get("text", "") for part in parts)
        elif item["type"] == "function_call":
            answer.calls.append(AnsweredCall(item["call_id"], item["name"], item["arguments"]))
        elif item["type"] == "custom_tool_call":
            arguments = msgspec.json.encode({"input": item["input"]}).decode()
            answer.calls.append(AnsweredCall(item["call_id"], item["name"], arguments))
    return answer


def _responses_whole(body: Json) -> RecordedAnswer:
    return _responses_items(body["output"])


def _responses_stream(events: list[Json]) -> RecordedAnswer:
    """Codex keeps an item from its `output_item.done` on, whatever follows."""
    answer = _responses_items([event["item"] for event in events if event.get("type") == "response.output_item.done"])
    completed = any(event.get("type") == "response.completed" for event in events)
    answer.complete = completed or bool(answer.text or answer.calls or answer.reasoning)
    if not answer.complete:
        deltas = [event["delta"] for event in events if event.get("type") == "response.output_text.delta"]
        answer.text = "".join(deltas)
    return answer


_WHOLE = {
    "anthropic": _anthropic_whole,
    "chat": _chat_whole,
    "responses": _responses_whole,
}
_STREAMED = {"anthropic": _anthropic_stream, "chat": _chat_stream, "responses": _responses_stream}
