"""OpenAI Responses: `POST /v1/responses`, request side and JSON answers (docs/harnesses.md)."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import msgspec

from gyre.chat.conversation import Conversation, Message, Tool, ToolCall
from gyre.proxy.dialects.base import (
    NOTHING,
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
    wishes,
)
from gyre.proxy.dialects.memo import Memo, identity
from gyre.proxy.dialects.openai import Content, Part, error_object, texts
from gyre.proxy.dialects.responses_items import envelope, finished, output_items
from gyre.proxy.dialects.responses_stream import ResponsesStream
from gyre.proxy.errors import CallError, Fault


class _Item(msgspec.Struct):
    """Any input item; opencode leaves the type of messages out."""

    type: str = "message"
    role: str = ""
    content: Content = None
    summary: list[Part] | None = None
    name: str = ""
    arguments: str = ""
    input: str = ""
    call_id: str = ""
    output: Content = None


class _Tool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    tools: "list[_Tool] | None" = None


_TOOLS: Any = list[_Tool] | None


class _Request(msgspec.Struct):
    input: str | list[msgspec.Raw]
    model: str = ""
    instructions: str | None = None
    tools: msgspec.Raw = NOTHING
    max_output_tokens: int | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None


_FOR_GPT_ONLY = ("local_shell", "shell", "apply_patch", "computer")
"""Types of tools that harnesses run but do not describe: OpenAI's models were trained to know them."""
_CUSTOM_PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class Responses:
    name = "responses"

    def read(self, body: bytes, headers: Mapping[str, str], memo: Memo) -> WireRequest:
        request = decode(body, _Request)
        for field in ("previous_response_id", "conversation", "prompt"):
            if getattr(request, field):
                raise CallError(Fault.INVALID, f"{field}: nothing is stored here; send the whole input.")
        if not request.input:
            raise CallError(Fault.INVALID, "input: at least one item is required.")
        if request.max_output_tokens is not None and request.max_output_tokens < 1:
            raise CallError(Fault.INVALID, "max_output_tokens: must be at least 1.")
        instructions = request.instructions or ""
        messages = [Message(role="system", text=instructions)] if instructions else []
        digests = [identity(instructions.encode())]
        if isinstance(request.input, str):
            messages.append(Message(role="user", text=join_text([request.input])))
            digests.append(identity(request.input.encode()))
            size = len(request.input)
        else:
            items = memo.read_each(_read_item, request.input, "input")
            messages.extend(_messages(item.value for item in items))
            digests.extend(item.digest for item in items)
            size = sum(item.size for item in items)
        declared = memo.read(_read_tools, request.tools, "tools")
        facts = RequestFacts(
            model=request.model,
            stream=bool(request.stream),
            max_tokens=request.max_output_tokens,
            headers=public_headers(headers),
            metadata={**(request.metadata or {}), **(request.client_metadata or {})},
            tool_forms=declared.value.forms,
        )
        conversation = Conversation(tuple(messages), declared.value.tools)
        size += len(instructions) + declared.size
        return WireRequest(conversation, facts, identity(declared.digest, *digests), size, wishes(body))

    def encoder(self, request: RequestFacts, head: TurnHead) -> ResponsesStream:
        return ResponsesStream(request, head)

    def response(self, request: RequestFacts, head: TurnHead, end: TurnEnd) -> dict[str, Any]:
        return {**envelope(head), **finished(end), "output": output_items(request, head, end.message)}

    def error_body(self, error: CallError) -> dict[str, Any]:
        return {"error": error_object(error)}


class _Declared(msgspec.Struct, frozen=True):
    tools: tuple[Tool, ...]
    forms: dict[str, ToolForm]
    """Only of tools that are not plain functions."""


def _read_tools(raw: msgspec.Raw, where: str) -> _Declared:
    declarations: list[_Tool] | None = decode(raw, _TOOLS, where)
    declared = list(_tools(declarations or [], ""))
    forms = {tool.name: form for tool, form in declared if form != ToolForm()}
    return _Declared(tuple(tool for tool, _ in declared), forms)


def _tools(tools: Iterable[_Tool], namespace: str) -> Iterator[tuple[Tool, ToolForm]]:
    """Functions, also inside namespaces, and custom tools; what OpenAI's servers would run (web_search) is left out."""
    for tool in tools:
        if tool.type.startswith(_FOR_GPT_ONLY):
            raise CallError(Fault.INVALID, f"tools: type {tool.type!r} is not supported; declare a function.")
        if tool.type in ("function", "custom") and not tool.name:
            raise CallError(Fault.INVALID, f"tools: a {tool.type} tool has no name.")
        if tool.type == "namespace":
            yield from _tools(tool.tools or [], tool.name)
        elif tool.type == "function":
            check_depth(tool.parameters, f"tools.{tool.name}.parameters")
            yield Tool(tool.name, tool.description or "", tool.parameters or {}), ToolForm(namespace)
        elif tool.type == "custom":
            yield Tool(tool.name, tool.description or "", _CUSTOM_PARAMETERS), ToolForm(namespace, custom=True)


class _Said(msgspec.Struct, frozen=True):
    """One part of an assistant turn."""

    text: str | None = None
    reasoning: str | None = None


_Element = ToolCall | _Said | Message


def _read_item(raw: msgspec.Raw, where: str) -> _Element:
    item = decode(raw, _Item, where)
    match item.type:
        case "function_call":
            return ToolCall(item.call_id, item.name, parse_arguments(item.arguments, f"function call {item.call_id}"))
        case "custom_tool_call":
            return ToolCall(item.call_id, item.name, {"input": item.input})
        case "function_call_output" | "custom_tool_call_output":
            return Message(role="tool", text=join_text(texts(item.output)), tool_call_id=item.call_id)
        case "reasoning":
            summary = join_text(part.text for part in item.summary or [])
            return _Said(reasoning=summary or join_text(texts(item.content)))
        case "message" if item.role == "assistant":
            return _Said(text=join_text(texts(item.content)))
        case "message" if item.role in ("user", "system", "developer"):
            role: Literal["user", "system"] = "user" if item.role == "user" else "system"
            return Message(role=role, text=join_text(texts(item.content)))
        case "message":
            raise CallError(Fault.INVALID, f"{where}: message role {item.role!r} is not supported.")
        case _:
            raise CallError(Fault.INVALID, f"{where}: item type {item.type!r} is not supported.")


def _messages(elements: Iterable[_Element]) -> Iterator[Message]:
    """Items as messages: reasoning, text and calls that follow each other are one assistant turn."""
    turn = _Turn()
    for element in elements:
        if isinstance(element, ToolCall):
            turn.calls.append(element)
            continue
        if isinstance(element, Message):
            yield from turn.take()
            yield element
            continue
        if turn.calls or turn.texts:
            yield from turn.take()
        if element.text is not None:
            turn.texts.append(element.text)
        if element.reasoning is not None:
            turn.reasoning.append(element.reasoning)
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
