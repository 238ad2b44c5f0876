"""What both OpenAI dialects share: content of messages, and error bodies."""

import base64
from collections.abc import Iterator
from typing import Any

import msgspec

from gyre.proxy.errors import CallError, ContextOverflow, Fault

_TEXTS = frozenset({"text", "input_text", "output_text", "reasoning_text", "summary_text"})


class _File(msgspec.Struct):
    file_data: str | None = None
    filename: str | None = None


class Part(msgspec.Struct):
    """A part of a message. Here and in every other part of a request, null is as if absent: SDKs send both."""

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None
    file: _File | None = None
    """Chat."""
    file_data: str | None = None
    """Responses."""
    filename: str | None = None


Content = str | list[Part] | None


def texts(content: Content) -> Iterator[str]:
    """The texts of a message's parts; what the policy cannot read stays visible as a gap."""
    if content is None:
        return
    if isinstance(content, str):
        yield content
        return
    for part in content:
        if part.type in _TEXTS:
            yield part.text or ""
        else:
            yield part.refusal or _file_text(part) or f"[{part.type} omitted]"


def _file_text(part: Part) -> str:
    """Name and content of an attached text file; "" for anything else."""
    file = part.file or _File(part.file_data, part.filename)
    kind, _, data = (file.file_data or "").partition(";base64,")
    if not kind.startswith("data:text/"):
        return ""
    try:
        text = base64.b64decode(data, validate=True).decode()
    except ValueError:
        return ""
    return f"{file.filename}\n{text}" if file.filename else text


_ERRORS: dict[Fault, tuple[str, str | None]] = {
    Fault.UNAUTHORIZED: ("authentication_error", "invalid_api_key"),
    Fault.NOT_FOUND: ("not_found_error", "not_found"),
    Fault.TOO_LARGE: ("invalid_request_error", "request_too_large"),
    Fault.OVERFLOW: ("invalid_request_error", "context_length_exceeded"),
    Fault.BUSY: ("rate_limit_error", "rate_limit_exceeded"),
    Fault.UNAVAILABLE: ("server_error", "server_is_overloaded"),
    Fault.INTERNAL: ("server_error", "server_error"),
}


def error_object(error: CallError) -> dict[str, Any]:
    kind, code = _ERRORS.get(error.fault, ("invalid_request_error", None))
    message = error.message
    if isinstance(error, ContextOverflow):
        # Clients recognise this wording (pi) or the code (Codex).
        message = (
            f"This model's maximum context length is {error.max_context} tokens. However, your messages resulted in "
            f"{error.prompt_tokens} tokens. Please reduce the length of the messages."
        )
    return {"message": message, "type": kind, "param": None, "code": code}
