"""Anthropic Messages: `POST /v1/messages`, streaming and not (docs/harnesses.md)."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Literal

import msgspec

from gyre.chat.canonical import BILLING_PREFIX, drop_billing
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
    public_headers,
    sse,
    wishes,
)
from gyre.proxy.dialects.memo import Memo, identity
from gyre.proxy.errors import CallError, Fault

SIGNATURE = "gyre"
"""Clients drop or rewrite thinking without a signature; any constant keeps it."""

_FOR_CLAUDE_ONLY = ("bash_", "text_editor_", "computer_", "memory_")
"""Types of tools that harnesses run but do not describe: Anthropic's models were trained to know them."""
_ERROR_TYPES = {
    Fault.UNAUTHORIZED: "authentication_error",
    Fault.NOT_FOUND: "not_found_error",
    Fault.TOO_LARGE: "request_too_large",
    Fault.BUSY: "rate_limit_error",
    Fault.UNAVAILABLE: "overloaded_error",
    Fault.INTERNAL: "api_error",
}


class _Source(msgspec.Struct):
    """Of a document."""

    type: str
    data: str | None = None
    """The text itself when the type is "text"."""
    content: "str | list[_Block] | None" = None
    """When the type is "content"."""


class _Block(msgspec.Struct):
    """Any content block; fields that its type does not have keep their defaults. Here and in every other part of a
    request, null is as if absent: SDKs send both."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: "str | list[_Block] | None" = None
    title: str | None = None
    context: str | None = None
    source: "str | _Source | None" = None


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block] | None = None


_SYSTEM: Any = str | list[_Block] | None


class _Tool(msgspec.Struct):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


_TOOLS: Any = list[_Tool] | None


class _Request(msgspec.Struct):
    messages: list[msgspec.Raw]
    model: str | None = None
    max_tokens: int | None = None
    system: msgspec.Raw = NOTHING
    tools: msgspec.Raw = NOTHING
    stream: bool | None = None
    metadata: msgspec.Raw = NOTHING


class AnthropicMessages:
    name = "anthropic"

    def read(self, body: bytes, headers: Mapping[str, str], memo: Memo) -> WireRequest:
        request = decode(body, _Request)
        if request.max_tokens is not None and request.max_tokens < 1:
            raise CallError(Fault.INVALID, "max_tokens: must be at least 1.")
        if not request.messages:
            raise CallError(Fault.INVALID, "messages: at least one message is required.")
        system, transport = memo.read(_read_system, request.system, "system").value
        first = (Message(role="system", text=system),) if system else ()
        tools = memo.read(_read_tools, request.tools, "tools")
        messages = memo.read_each(_read_message, request.messages, "messages")
        facts = RequestFacts(
            model=request.model or "",
            stream=bool(request.stream),
            max_tokens=request.max_tokens,
            headers=public_headers(headers),
            metadata=notes(request.metadata),
            transport_system=transport,
        )
        conversation = Conversation(tuple(chain(first, *(message.value for message in messages))), tools.value)
        digests = (message.digest for message in messages)
        said = identity(identity(system.encode()), tools.digest, *digests)
        size = len(system) + tools.size + sum(message.size for message in messages)
        return WireRequest(conversation, facts, said, size, wishes(body))

    def elements(self, body: bytes) -> list[list[msgspec.Raw]]:
        request = decode(body, _Request)
        return [request.messages, [request.tools, request.system]]

    def encoder(self, request: RequestFacts, head: TurnHead) -> "_Stream":  # noqa: ARG002
        return _Stream(head)

    def response(self, request: RequestFacts, head: TurnHead, end: TurnEnd) -> dict[str, Any]:  # noqa: ARG002
        content: list[dict[str, Any]] = []
        if end.message.reasoning:
            content.append({"type": "thinking", "thinking": end.message.reasoning, "signature": SIGNATURE})
        if end.message.text:
            content.append({"type": "text", "text": end.message.text})
        for call in end.message.tool_calls:
            arguments = call.arguments if isinstance(call.arguments, dict) else {"unparsed": call.arguments}
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
        return {
            **_envelope(head),
            "content": content,
            "stop_reason": _stop_reason(end),
            "usage": _usage(end.usage),
        }

    def error_body(self, error: CallError) -> dict[str, Any]:
        kind = _ERROR_TYPES.get(error.fault, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}


class _Stream:
    """message_start, blocks, message_delta, message_stop; at most one block is open."""

    def __init__(self, head: TurnHead) -> None:
        self._head = head
        self._index = -1
        self._open: Literal["", "text", "thinking"] = ""

    def start(self) -> bytes:
        usage = _usage(Usage(prompt=self._head.prompt_tokens, output=0))
        message = {**_envelope(self._head), "content": [], "stop_reason": None, "usage": usage}
        return _event("message_start", message=message)

    def delta(self, delta: Delta) -> bytes:
        if delta.reasoning:
            part = {"type": "thinking_delta", "thinking": delta.reasoning}
            return self._into("thinking") + self._block("content_block_delta", delta=part)
        part = {"type": "text_delta", "text": delta.text}
        return self._into("text") + self._block("content_block_delta", delta=part)

    def keep_alive(self) -> bytes:
        return _event("ping")

    def end(self, end: TurnEnd) -> bytes:
        out = [self._close()]
        for call in end.message.tool_calls:
            self._index += 1
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            part = {"type": "input_json_delta", "partial_json": arguments_text(call)}
            out.append(self._block("content_block_start", content_block=block))
            out.append(self._block("content_block_delta", delta=part))
            out.append(self._block("content_block_stop"))
        stop = {"stop_reason": _stop_reason(end), "stop_sequence": None}
        out.append(_event("message_delta", delta=stop, usage=_usage(end.usage)))
        out.append(_event("message_stop"))
        return b"".join(out)

    def error(self, error: CallError) -> bytes:
        return sse(AnthropicMessages().error_body(error), "error")

    def _into(self, kind: Literal["text", "thinking"]) -> bytes:
        if self._open == kind:
            return b""
        closed = self._close()
        self._open = kind
        self._index += 1
        block = {"type": "text", "text": ""} if kind == "text" else {"type": kind, "thinking": "", "signature": ""}
        return closed + self._block("content_block_start", content_block=block)

    def _close(self) -> bytes:
        kind, self._open = self._open, ""
        if not kind:
            return b""
        signature = b""
        if kind == "thinking":
            part = {"type": "signature_delta", "signature": SIGNATURE}
            signature = self._block("content_block_delta", delta=part)
        return signature + self._block("content_block_stop")

    def _block(self, event: str, **fields: Any) -> bytes:
        return _event(event, index=self._index, **fields)


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)


def _envelope(head: TurnHead) -> dict[str, Any]:
    return {
        "id": f"msg_{head.id}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "stop_sequence": None,
    }


def _usage(usage: Usage) -> dict[str, int]:
    # Cache reads count as plain input: clients add the two, and merge message_start with message_delta in ways that
    # would count a cached prompt twice.
    return {
        "input_tokens": usage.prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": usage.output,
    }


def _stop_reason(end: TurnEnd) -> str:
    if end.finish == "length":
        return "max_tokens"
    return "tool_use" if end.message.tool_calls else "end_turn"


def _read_system(raw: msgspec.Raw, where: str) -> tuple[str, tuple[str, ...]]:
    system: str | list[_Block] | None = decode(raw, _SYSTEM, where)
    blocks = [system] if isinstance(system, str) else [_text(block) for block in system or []]
    transport = tuple(block for block in blocks if block.startswith(BILLING_PREFIX))
    return join_text(drop_billing(blocks)), transport


def _read_tools(raw: msgspec.Raw, where: str) -> tuple[Tool, ...]:
    tools = []
    declared: list[_Tool] | None = decode(raw, _TOOLS, where)
    for tool in declared or []:
        if not tool.input_schema and (tool.type or "").startswith(_FOR_CLAUDE_ONLY):
            raise CallError(Fault.INVALID, f"tools.{tool.name}: type {tool.type!r} needs an input_schema here.")
        # A typed tool without a schema is run by Anthropic's servers; the policy cannot use it.
        if tool.input_schema or tool.type in (None, "custom"):
            check_depth(tool.input_schema, f"tools.{tool.name}.input_schema")
            tools.append(Tool(tool.name, tool.description or "", tool.input_schema or {}))
    return tuple(tools)


def _read_message(raw: msgspec.Raw, where: str) -> tuple[Message, ...]:
    return tuple(_messages(decode(raw, _Message, where)))


def _messages(message: _Message) -> Iterator[Message]:
    """One wire message as canonical messages: each tool result becomes its own, in the order received."""
    blocks = _blocks(message.content)
    if message.role == "assistant":
        yield _assistant(blocks)
        return
    texts: list[str] = []
    for block in blocks:
        if block.type == "tool_result":
            if text := join_text(texts):
                yield Message(role=message.role, text=text)
            texts = []
            yield Message(role="tool", text=_result_text(block), tool_call_id=block.tool_use_id or "")
        else:
            texts.append(_text(block))
    if text := join_text(texts):
        yield Message(role=message.role, text=text)


def _assistant(blocks: list[_Block]) -> Message:
    calls = []
    for block in blocks:
        if block.type == "tool_use":
            calls.append(ToolCall(block.id or "", block.name or "", _arguments(block)))
    return Message(
        role="assistant",
        text=join_text([_text(b) for b in blocks if b.type not in ("tool_use", "thinking", "redacted_thinking")]),
        reasoning=join_text([b.thinking or "" for b in blocks if b.type == "thinking"]),
        tool_calls=tuple(calls),
    )


def _arguments(block: _Block) -> dict[str, Any] | str:
    """An object, or the text of what is none."""
    check_depth(block.input, f"tool_use {block.id}")
    if isinstance(block.input, dict | str):
        return block.input
    return {} if block.input is None else msgspec.json.encode(block.input).decode()


def _result_text(block: _Block) -> str:
    return block.content if isinstance(block.content, str) else _texts(block.content)


def _blocks(content: str | list[_Block] | None) -> list[_Block]:
    return [_Block("text", content)] if isinstance(content, str) else content or []


def _texts(content: str | list[_Block] | None) -> str:
    return join_text([_text(block) for block in _blocks(content)])


def _text(block: _Block) -> str:
    if block.type == "text":
        return block.text or ""
    if block.type == "tool_reference":
        return f"[tool_reference: {block.tool_name or ''}]"
    if block.type == "search_result":
        source = block.source if isinstance(block.source, str) else ""
        return join_text([block.title or "", source, _texts(block.content)])
    if block.type == "document" and isinstance(block.source, _Source) and block.source.type in ("text", "content"):
        text = block.source.data or "" if block.source.type == "text" else _texts(block.source.content)
        return join_text([block.title or "", block.context or "", text])
    # The policy reads text only; what it cannot see stays visible as a gap.
    return f"[{block.type} omitted]"
