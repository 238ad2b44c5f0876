"""OpenAI Responses: `POST /v1/responses`, request side and JSON answers (docs/harnesses.md)."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, count
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
    notes,
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

    type: str | None = None
    role: str | None = None
    content: Content = None
    summary: list[Part] | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    call_id: str | None = None
    namespace: str | None = None
    output: Content = None


class _Tool(msgspec.Struct):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    tools: "list[_Tool] | None" = None


_TOOLS: Any = list[_Tool] | None


class _Request(msgspec.Struct):
    input: str | list[msgspec.Raw] | None = None
    model: str | None = None
    instructions: str | None = None
    tools: msgspec.Raw = NOTHING
    max_output_tokens: int | None = None
    stream: bool | None = None
    metadata: msgspec.Raw = NOTHING
    client_metadata: msgspec.Raw = NOTHING
    previous_response_id: msgspec.Raw = NOTHING
    conversation: msgspec.Raw = NOTHING
    prompt: msgspec.Raw = NOTHING


_FOR_GPT_ONLY = ("local_shell", "shell", "apply_patch", "computer")
"""Types of tools that harnesses run but do not describe: OpenAI's models were trained to know them."""
_CUSTOM_PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


_ABSENT = (b"null", b'""', b"{}", b"[]")


class Responses:
    name = "responses"

    def read(self, body: bytes, headers: Mapping[str, str], memo: Memo) -> WireRequest:
        request = decode(body, _Request)
        for field in ("previous_response_id", "conversation", "prompt"):
            if bytes(getattr(request, field)) not in _ABSENT:
                raise CallError(Fault.INVALID, f"{field}: nothing is stored here; send the whole input.")
        if not request.input:
            raise CallError(Fault.INVALID, "input: at least one item is required.")
        if request.max_output_tokens is not None and request.max_output_tokens < 1:
            raise CallError(Fault.INVALID, "max_output_tokens: must be at least 1.")
        declared = memo.read(_read_tools, request.tools, "tools")
        instructions = request.instructions or ""
        messages = [Message(role="system", text=instructions)] if instructions else []
        digests = [identity(instructions.encode())]
        if isinstance(request.input, str):
            messages.append(Message(role="user", text=join_text([request.input])))
            digests.append(identity(request.input.encode()))
            size = len(request.input)
        else:
            items = memo.read_each(_read_item, request.input, "input")
            names = {(form.namespace, form.name): name for name, form in declared.value.forms.items()}
            messages.extend(_messages((item.value for item in items), names))
            digests.extend(item.digest for item in items)
            size = sum(item.size for item in items)
        facts = RequestFacts(
            model=request.model or "",
            stream=bool(request.stream),
            max_tokens=request.max_output_tokens,
            headers=public_headers(headers),
            metadata={**notes(request.metadata), **notes(request.client_metadata)},
            tool_forms=declared.value.forms,
        )
        conversation = Conversation(tuple(messages), declared.value.tools)
        size += len(instructions) + declared.size
        return WireRequest(conversation, facts, identity(declared.digest, *digests), size, wishes(body))

    def elements(self, body: bytes) -> list[list[msgspec.Raw]]:
        request = decode(body, _Request)
        items = request.input if isinstance(request.input, list) else []
        return [items, [request.tools]]

    def encoder(self, request: RequestFacts, head: TurnHead) -> ResponsesStream:
        return ResponsesStream(request, head)

    def response(self, request: RequestFacts, head: TurnHead, end: TurnEnd) -> dict[str, Any]:
        return {**envelope(head), **finished(end), "output": output_items(request, head, end.message)}

    def error_body(self, error: CallError) -> dict[str, Any]:
        return {"error": error_object(error)}


class _Declared(msgspec.Struct, frozen=True):
    tools: tuple[Tool, ...]
    forms: dict[str, ToolForm]
    """By the policy's names. Only of tools that are not plain functions."""


def _read_tools(raw: msgspec.Raw, where: str) -> _Declared:
    declarations: list[_Tool] | None = decode(raw, _TOOLS, where)
    declared = list(_tools(declarations or [], ""))
    names = _policy_names([form for _, form in declared])
    tools = tuple(msgspec.structs.replace(tool, name=names[form]) for tool, form in declared)
    forms = {names[form]: form for _, form in declared if form != ToolForm(form.name)}
    return _Declared(tools, forms)


def _policy_names(forms: Iterable[ToolForm]) -> dict[ToolForm, str]:
    """A name of its own for each tool: the declared one where no other namespace has it too (MCP servers often do),
    else one that begins with the namespace."""
    different = list(dict.fromkeys(forms))
    homes = Counter(form.name for form in different)
    # A plain function keeps its name: calls to it say no namespace.
    names = {form: form.name for form in different if not form.namespace or homes[form.name] == 1}
    taken = set(names.values())
    for form in different:
        if form not in names:
            qualified = f"{form.namespace.rstrip('_')}__{form.name}"
            spellings = chain([qualified], (f"{qualified}_{number}" for number in count(2)))
            names[form] = next(name for name in spellings if name not in taken)
            taken.add(names[form])
    return names


def _tools(tools: Iterable[_Tool], namespace: str) -> Iterator[tuple[Tool, ToolForm]]:
    """Functions, also inside namespaces, and custom tools; what OpenAI's servers would run (web_search) is left out."""
    for tool in tools:
        name, description = tool.name or "", tool.description or ""
        if tool.type.startswith(_FOR_GPT_ONLY):
            raise CallError(Fault.INVALID, f"tools: type {tool.type!r} is not supported; declare a function.")
        if tool.type in ("function", "custom") and not name:
            raise CallError(Fault.INVALID, f"tools: a {tool.type} tool has no name.")
        if tool.type == "namespace":
            yield from _tools(tool.tools or [], name)
        elif tool.type == "function":
            check_depth(tool.parameters, f"tools.{name}.parameters")
            yield Tool(name, description, tool.parameters or {}), ToolForm(name, namespace)
        elif tool.type == "custom":
            yield Tool(name, description, _CUSTOM_PARAMETERS), ToolForm(name, namespace, custom=True)


class _Said(msgspec.Struct, frozen=True):
    """One part of an assistant turn."""

    text: str | None = None
    reasoning: str | None = None


class _Called(msgspec.Struct, frozen=True):
    """A call, by the name that its declaration has."""

    call: ToolCall
    namespace: str


_Element = _Called | _Said | Message


def _read_item(raw: msgspec.Raw, where: str) -> _Element:
    item = decode(raw, _Item, where)
    call_id, name = item.call_id or "", item.name or ""
    # opencode leaves the type of messages out.
    match item.type or "message":
        case "function_call":
            arguments = parse_arguments(item.arguments or "", f"function call {call_id}")
            return _Called(ToolCall(call_id, name, arguments), item.namespace or "")
        case "custom_tool_call":
            return _Called(ToolCall(call_id, name, {"input": item.input or ""}), item.namespace or "")
        case "function_call_output" | "custom_tool_call_output":
            return Message(role="tool", text=join_text(texts(item.output)), tool_call_id=call_id)
        case "reasoning":
            summary = join_text(part.text or "" for part in item.summary or [])
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


def _messages(elements: Iterable[_Element], names: Mapping[tuple[str, str], str]) -> Iterator[Message]:
    """Items as messages: reasoning, text and calls that follow each other are one assistant turn. `names`: (namespace,
    name) → the policy's name."""
    turn = _Turn()
    for element in elements:
        if isinstance(element, _Called):
            call = element.call
            name = names.get((element.namespace, call.name), call.name)
            turn.calls.append(call if name == call.name else ToolCall(call.id, name, call.arguments))
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
