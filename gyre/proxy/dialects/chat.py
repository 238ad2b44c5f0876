"""OpenAI Chat Completions: `POST /v1/chat/completions`, streaming and not (docs/harnesses.md)."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from gyre.chat.conversation import Conversation, Message, Tool, ToolCall
from gyre.proxy.dialects.base import (
    NOTHING,
    Delta,
    RequestFacts,
    TurnEnd,
    TurnHead,
    Usage,
    WireRequest,
    arguments_text,
    check_depth,
    decode,
    join_text,
    notes,
    parse_arguments,
    public_headers,
    sse,
    wishes,
)
from gyre.proxy.dialects.memo import Memo, identity
from gyre.proxy.dialects.openai import Content, error_object, texts
from gyre.proxy.errors import CallError, Fault


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    """An object from clients that do not follow the API."""


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same, as vLLM and OpenRouter call it."""
    refusal: str | None = None
    function_call: Any = None


class _Declared(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    function: _Declared


_TOOLS: Any = list[_Tool] | None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Request(msgspec.Struct):
    messages: list[msgspec.Raw]
    model: str | None = None
    tools: msgspec.Raw = NOTHING
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    metadata: msgspec.Raw = NOTHING
    n: int | None = None
    functions: list[msgspec.Raw] | None = None


class ChatCompletions:
    name = "chat"

    def read(self, body: bytes, headers: Mapping[str, str], memo: Memo) -> WireRequest:
        request = decode(body, _Request)
        if not request.messages:
            raise CallError(Fault.INVALID, "messages: at least one message is required.")
        if request.n not in (None, 1):
            raise CallError(Fault.INVALID, "n: only one choice per call is sampled.")
        if request.functions:
            raise CallError(Fault.INVALID, "functions: not supported; declare them as tools.")
        asked = request.max_completion_tokens
        limit = request.max_tokens if asked is None else asked
        if limit is not None and limit < 1:
            raise CallError(Fault.INVALID, "max_tokens: must be at least 1.")
        tools = memo.read(_read_tools, request.tools, "tools")
        messages = memo.read_each(_read_message, request.messages, "messages")
        facts = RequestFacts(
            model=request.model or "",
            stream=bool(request.stream),
            max_tokens=limit,
            include_usage=request.stream_options is not None and bool(request.stream_options.include_usage),
            headers=public_headers(headers),
            metadata=notes(request.metadata),
        )
        conversation = Conversation(tuple(message.value for message in messages), tools.value)
        said = identity(tools.digest, *(message.digest for message in messages))
        return WireRequest(
            conversation, facts, said, tools.size + sum(message.size for message in messages), wishes(body)
        )

    def elements(self, body: bytes) -> list[list[msgspec.Raw]]:
        request = decode(body, _Request)
        return [request.messages, [request.tools]]

    def encoder(self, request: RequestFacts, head: TurnHead) -> "_Stream":
        return _Stream(request, head)

    def response(self, request: RequestFacts, head: TurnHead, end: TurnEnd) -> dict[str, Any]:  # noqa: ARG002
        message: dict[str, Any] = {"role": "assistant", "content": end.message.text or None}
        if end.message.reasoning:
            message["reasoning_content"] = end.message.reasoning
        if end.message.tool_calls:
            message["tool_calls"] = [_wire_call(call, arguments_text(call)) for call in end.message.tool_calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(end)}
        return {**_envelope(head, "chat.completion"), "choices": [choice], "usage": _usage(end.usage)}

    def error_body(self, error: CallError) -> dict[str, Any]:
        return {"error": error_object(error)}


class _Stream:
    def __init__(self, request: RequestFacts, head: TurnHead) -> None:
        self._request = request
        self._head = head

    def start(self) -> bytes:
        return self._choice({"role": "assistant", "content": ""})

    def delta(self, delta: Delta) -> bytes:
        if delta.reasoning:
            return self._choice({"reasoning_content": delta.reasoning})
        return self._choice({"content": delta.text})

    def keep_alive(self) -> bytes:
        return self._choice({})

    def end(self, end: TurnEnd) -> bytes:
        out = []
        for index, call in enumerate(end.message.tool_calls):
            out.append(self._choice({"tool_calls": [{"index": index, **_wire_call(call, "")}]}))
            arguments = {"index": index, "function": {"arguments": arguments_text(call)}}
            out.append(self._choice({"tool_calls": [arguments]}))
        out.append(self._choice({}, _finish_reason(end)))
        if self._request.include_usage:
            out.append(sse({**self._chunk(), "choices": [], "usage": _usage(end.usage)}))
        out.append(sse("[DONE]"))
        return b"".join(out)

    def error(self, error: CallError) -> bytes:
        return sse({"error": error_object(error)})

    def _chunk(self) -> dict[str, Any]:
        return _envelope(self._head, "chat.completion.chunk")

    def _choice(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        return sse({**self._chunk(), "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def _envelope(head: TurnHead, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{head.id}", "object": kind, "created": head.created, "model": head.model}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def _finish_reason(end: TurnEnd) -> str:
    if end.finish == "length":
        return "length"
    return "tool_calls" if end.message.tool_calls else "stop"


def _wire_call(call: ToolCall, arguments: str) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _read_tools(raw: msgspec.Raw, where: str) -> tuple[Tool, ...]:
    declarations: list[_Tool] | None = decode(raw, _TOOLS, where)
    tools = []
    for tool in declarations or []:
        declared = tool.function
        check_depth(declared.parameters, f"tools.{declared.name}.parameters")
        tools.append(Tool(declared.name, declared.description or "", declared.parameters or {}))
    return tuple(tools)


def _read_message(raw: msgspec.Raw, where: str) -> Message:
    message = decode(raw, _Message, where)
    if message.function_call is not None:
        raise CallError(Fault.INVALID, f"{where}.function_call: not supported; use tool_calls.")
    thoughts, said = _split(message.content)
    text = join_text([*texts(said), message.refusal or ""])
    if message.role == "tool":
        return Message(role="tool", text=text, tool_call_id=message.tool_call_id or "")
    if message.role != "assistant":
        return Message(role="user" if message.role == "user" else "system", text=text)
    calls = tuple(
        ToolCall(call.id or "", call.function.name or "", _arguments(call)) for call in message.tool_calls or []
    )
    reasoning = message.reasoning_content or message.reasoning or thoughts
    return Message(role="assistant", text=text, reasoning=reasoning, tool_calls=calls)


def _split(content: Content) -> tuple[str, Content]:
    """Thoughts that a client put into the content, and the rest."""
    if not isinstance(content, list):
        return "", content
    thoughts = [part.thinking or part.text or "" for part in content if part.type == "thinking"]
    return join_text(thoughts), [part for part in content if part.type != "thinking"]


def _arguments(call: _Call) -> dict[str, Any] | str:
    arguments, where = call.function.arguments, f"tool call {call.id}"
    if not isinstance(arguments, dict):
        return parse_arguments(arguments or "", where)
    check_depth(arguments, where)
    return arguments
