"""OpenAI Responses: `POST /v1/responses`, request side and JSON answers (notes/harnesses.md §6, §8)."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from gyre.proxy.dialects.base import (
    RequestFacts,
    ToolForm,
    TurnEnd,
    TurnHead,
    WireRequest,
    check_depth,
    decode,
    join_text,
    parse_arguments,
    public_headers,
)
from gyre.proxy.dialects.openai import error_object
from gyre.proxy.dialects.responses_items import envelope, finished, output_items
from gyre.proxy.dialects.responses_stream import ResponsesStream
from gyre.proxy.errors import CallError, Fault
from gyre.trajectory.conversation import Conversation, Message, Tool, ToolCall


class _Part(msgspec.Struct):
    type: str
    text: str = ""
    refusal: str = ""


_Content = str | list[_Part] | None


class _Item(msgspec.Struct):
    """Any input item; opencode leaves the type of messages out."""

    type: str = "message"
    role: str = ""
    content: _Content = None
    summary: list[_Part] | None = None
    name: str = ""
    arguments: str = ""
    input: str = ""
    call_id: str = ""
    output: _Content = None


class _Tool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    tools: "list[_Tool] | None" = None


class _Request(msgspec.Struct):
    input: str | list[_Item]
    model: str = ""
    instructions: str | None = None
    tools: list[_Tool] | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None
    previous_response_id: str | None = None


_CUSTOM_PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class Responses:
    name = "responses"

    def read(self, body: bytes, headers: Mapping[str, str]) -> WireRequest:
        request = decode(body, _Request)
        items = [_Item(role="user", content=request.input)] if isinstance(request.input, str) else request.input
        if request.previous_response_id:
            raise CallError(Fault.INVALID, "previous_response_id: responses are not stored; send the whole input.")
        if not items:
            raise CallError(Fault.INVALID, "input: at least one item is required.")
        if request.max_output_tokens is not None and request.max_output_tokens < 1:
            raise CallError(Fault.INVALID, "max_output_tokens: must be at least 1.")
        messages = [Message(role="system", text=request.instructions)] if request.instructions else []
        messages.extend(_messages(items))
        declared = list(_tools(request.tools or [], ""))
        facts = RequestFacts(
            model=request.model,
            stream=bool(request.stream),
            max_tokens=request.max_output_tokens,
            headers=public_headers(headers),
            metadata={**(request.metadata or {}), **(request.client_metadata or {})},
            tool_forms={tool.name: form for tool, form in declared if form != ToolForm()},
        )
        return WireRequest(Conversation(tuple(messages), tuple(tool for tool, _ in declared)), facts)

    def encoder(self, request: RequestFacts, head: TurnHead) -> ResponsesStream:
        return ResponsesStream(request, head)

    def response(self, request: RequestFacts, head: TurnHead, end: TurnEnd) -> dict[str, Any]:
        return {**envelope(head), **finished(end), "output": output_items(request, head, end.message)}

    def error_body(self, error: CallError) -> dict[str, Any]:
        return {"error": error_object(error)}


def _tools(tools: Iterable[_Tool], namespace: str) -> Iterator[tuple[Tool, ToolForm]]:
    """Functions, also inside namespaces, and custom tools; what OpenAI's servers would run (web_search) is left out."""
    for tool in tools:
        if tool.type == "namespace":
            yield from _tools(tool.tools or [], tool.name)
        elif tool.type == "function":
            check_depth(tool.parameters, f"tools.{tool.name}.parameters")
            yield Tool(tool.name, tool.description or "", tool.parameters or {}), ToolForm(namespace)
        elif tool.type == "custom":
            yield Tool(tool.name, tool.description or "", _CUSTOM_PARAMETERS), ToolForm(namespace, custom=True)


def _messages(items: list[_Item]) -> Iterator[Message]:
    """Items as messages: reasoning, text and calls that follow each other are one assistant turn."""
    turn = _Turn()
    for item in items:
        if item.type in ("function_call", "custom_tool_call"):
            turn.calls.append(_call(item))
            continue
        assistant_text = item.type == "message" and item.role == "assistant"
        if item.type == "reasoning" or assistant_text:
            if turn.calls or turn.texts:
                yield from turn.take()
            text = join_text(list(_texts(item.content)))
            if assistant_text:
                turn.texts.append(text)
            else:
                turn.reasoning.append(join_text([part.text for part in item.summary or []]) or text)
            continue
        yield from turn.take()
        if item.type in ("function_call_output", "custom_tool_call_output"):
            yield Message(role="tool", text=join_text(list(_texts(item.output))), tool_call_id=item.call_id)
        elif item.type == "message":
            role = item.role
            if role not in ("user", "system", "developer"):
                raise CallError(Fault.INVALID, f"input: message role {role!r} is not supported.")
            yield Message(role="user" if role == "user" else "system", text=join_text(list(_texts(item.content))))
        else:
            raise CallError(Fault.INVALID, f"input: item type {item.type!r} is not supported.")
    yield from turn.take()


class _Turn(msgspec.Struct):
    """The assistant turn being collected."""

    reasoning: list[str] = []
    texts: list[str] = []
    calls: list[ToolCall] = []

    def take(self) -> Iterator[Message]:
        if self.reasoning or self.texts or self.calls:
            text, reasoning = join_text(self.texts), join_text(self.reasoning)
            yield Message(role="assistant", text=text, reasoning=reasoning, tool_calls=tuple(self.calls))
            self.reasoning, self.texts, self.calls = [], [], []


def _call(item: _Item) -> ToolCall:
    if item.type == "custom_tool_call":
        return ToolCall(item.call_id, item.name, {"input": item.input})
    return ToolCall(item.call_id, item.name, parse_arguments(item.arguments, f"function call {item.call_id}"))


def _texts(content: _Content) -> Iterator[str]:
    if content is None:
        return
    if isinstance(content, str):
        yield content
        return
    for part in content:
        if part.type in ("input_text", "output_text", "text", "reasoning_text", "summary_text"):
            yield part.text
        else:
            yield part.refusal or f"[{part.type} omitted]"
