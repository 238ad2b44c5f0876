"""What a wire dialect is: a pure translation between an API's JSON and Gyre's canonical conversation.

In: a request body becomes a `WireRequest`. Out: the events of a sampled turn become the API's stream, or its JSON. An
encoder is a pure function of the events it is given, so a replayed turn yields the same bytes.

Commit point: deltas go out while tokens are produced; tool calls and everything that closes a turn go out only in
`end`, after the record is stored. So no harness acts on a call that could still be lost.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar

import msgspec

from gyre.chat.conversation import MAX_DEPTH, Conversation, Message, ToolCall, is_shallow
from gyre.core.records import FinishReason
from gyre.proxy.dialects.memo import Memo, identity
from gyre.proxy.errors import CallError, Fault

T = TypeVar("T")


class ToolForm(msgspec.Struct, frozen=True):
    """How a tool was declared, where calls to it must be spelled in the same form (Responses API)."""

    name: str
    """Unique in its namespace. The policy knows the tool by another name when several namespaces have it."""
    namespace: str = ""
    custom: bool = False


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says besides its conversation."""

    model: str
    stream: bool
    max_tokens: int | None
    """The harness's bound on the answer; None when it sent none."""
    include_usage: bool = True
    """Chat only: whether the stream ends with a usage chunk."""
    headers: dict[str, str] = {}
    """Lower-case names; credentials removed."""
    metadata: dict[str, Any] = {}
    """The body's own metadata object."""
    transport_system: tuple[str, ...] = ()
    """System blocks that are transport, not prompt (Claude Code's billing header)."""
    tool_forms: dict[str, ToolForm] = {}
    """By the names that the policy knows; plain functions are absent."""


class WireRequest(msgspec.Struct, frozen=True):
    conversation: Conversation
    facts: RequestFacts
    identity: bytes
    """Equal for requests whose messages and tools say the same one by one, however they are spelled."""
    size: int
    """Bytes of what its messages and tools say, as JSON."""
    wishes: bytes = b""
    """Equal for requests that wish for the answer in the same way; see `wishes`."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of the policy's tokenizer; harnesses compact by them."""

    prompt: int
    output: int
    """Reasoning included; it is not counted on its own."""
    cached: int = 0


class TurnHead(msgspec.Struct, frozen=True, kw_only=True):
    """Known before the first token."""

    id: str
    """Call id; `[A-Za-z0-9_-]`, unique in the execution."""
    model: str
    """As the harness named it."""
    created: int
    """Unix seconds."""
    prompt_tokens: int


class Delta(msgspec.Struct, frozen=True):
    """Text that became readable; at most one of the two is set. None: tokens came that are not readable yet."""

    text: str = ""
    reasoning: str = ""


class TurnEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The complete turn, sent once it is recorded. `message` repeats all deltas and adds the tool calls."""

    message: Message
    finish: FinishReason
    usage: Usage


class Encoder(Protocol):
    """Bytes of one streamed answer. Order of calls: start, (delta | keep_alive)*, then end or error."""

    def start(self) -> bytes: ...
    def delta(self, delta: Delta) -> bytes: ...
    def keep_alive(self) -> bytes:
        """A real event that changes nothing; clients reset their idle timers on it."""
        ...

    def end(self, end: TurnEnd) -> bytes: ...
    def error(self, error: CallError) -> bytes: ...


class Dialect(Protocol):
    name: str

    def read(self, body: bytes, headers: Mapping[str, str], memo: Memo) -> WireRequest:
        """`memo` is the session's: the part of the history that it knows is not read again. Raises CallError (INVALID)
        with the place of the fault."""
        ...

    def elements(self, body: bytes) -> list[list[msgspec.Raw]]:
        """What a request says, not read yet: its messages, and everything else that may be long. Raises CallError
        (INVALID)."""
        ...

    def encoder(self, request: RequestFacts, head: TurnHead) -> Encoder: ...

    def response(self, request: RequestFacts, head: TurnHead, end: TurnEnd) -> dict[str, Any]:
        """The non-streaming answer."""
        ...

    def error_body(self, error: CallError) -> dict[str, Any]: ...


NOTHING = msgspec.Raw(b"null")
"""Stands for a field that a request left out."""

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_SECRET_HEADERS = frozenset({"authorization", "x-api-key", "cookie", "proxy-authorization"})


def decode(body: bytes | msgspec.Raw, kind: type[T], where: str = "") -> T:
    """Parses a request body, or the part of it at `where`, into a wire struct.

    JavaScript harnesses cut strings inside surrogate pairs and send the lone half as an escape: it is replaced, like
    Node's own UTF-8 encoder would. Everything else that is not JSON of the right shape raises CallError (INVALID).
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except RecursionError:
        raise _too_deep(where) from None
    except msgspec.DecodeError as error:
        if isinstance(error, msgspec.ValidationError) or rb"\ud" not in bytes(body).lower():
            raise _invalid(where, error) from None
    try:
        clean = _without_lone_surrogates(json.loads(bytes(body), parse_constant=_refuse_constant))
        return msgspec.json.decode(json.dumps(clean, ensure_ascii=False), type=kind)
    except RecursionError:
        raise _too_deep(where) from None
    except ValueError as error:
        raise _invalid(where, error) from None


_NO_WISHES = frozenset(
    {"messages", "input", "system", "instructions", "tools", "stream", "stream_options", "metadata", "client_metadata"}
)
_LONG = 64 * 2**10
_canonical = msgspec.json.Encoder(order="deterministic")


def wishes(body: bytes) -> bytes:
    """A digest of every field of a request but what was said, how the answer travels, and notes of the client: model,
    bounds, sampling, tool choice and whatever else an API has. Equal however they are spelled; null is as if absent."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        wished = {name: _wish(raw) for name, raw in fields.items() if name not in _NO_WISHES}
    except (msgspec.DecodeError, RecursionError):
        # Half surrogate pairs, or a depth that only ignored fields have.
        return identity(body)
    return identity(_canonical.encode({name: value for name, value in wished.items() if value is not None}))


def _wish(raw: msgspec.Raw) -> Any:
    # A long one is not worth reading; its spelling is its identity.
    return msgspec.json.decode(raw) if memoryview(raw).nbytes <= _LONG else identity(bytes(raw)).hex()


def notes(raw: msgspec.Raw) -> dict[str, Any]:
    """The metadata object of a request; empty when it is none, or too long to be notes."""
    if memoryview(raw).nbytes > _LONG:
        return {}
    try:
        return msgspec.json.decode(raw, type=dict[str, Any] | None) or {}
    except (msgspec.DecodeError, RecursionError):
        return {}


def _invalid(where: str, error: Exception) -> CallError:
    return CallError(Fault.INVALID, f"Invalid request: {where}{': ' if where else ''}{error}.")


def _too_deep(where: str) -> CallError:
    return CallError(Fault.INVALID, f"Invalid request: {where}{': ' if where else ''}JSON is nested too deeply.")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _without_lone_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return _LONE_SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_without_lone_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_lone_surrogates(key): _without_lone_surrogates(item) for key, item in value.items()}
    return value


def check_depth(value: Any, where: str) -> None:
    """Raises CallError when a free-form JSON value is nested deeper than templates can render."""
    if not is_shallow(value):
        raise CallError(Fault.INVALID, f"Invalid request: {where} is nested deeper than {MAX_DEPTH} levels.")


def parse_arguments(text: str, where: str) -> dict[str, Any] | str:
    """Arguments of an echoed call: an object, or the text itself when it is not one."""
    if not text.strip():
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    if not isinstance(value, dict):
        return text
    check_depth(value, where)
    return value


def arguments_text(call: ToolCall) -> str:
    if isinstance(call.arguments, str):
        return call.arguments
    return msgspec.json.encode(call.arguments).decode()


def join_text(blocks: Iterable[str]) -> str:
    """Text blocks of one message, in canonical form: blank blocks dropped, the rest joined by a newline."""
    return "\n".join(block for block in blocks if block.strip())


def public_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items() if name.lower() not in _SECRET_HEADERS}


def sse(data: dict[str, Any] | str, event: str | None = None) -> bytes:
    """One server-sent event."""
    payload = data.encode() if isinstance(data, str) else msgspec.json.encode(data)
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + payload + b"\n\n"
