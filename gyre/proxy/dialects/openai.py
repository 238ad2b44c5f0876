"""What both OpenAI dialects share: content of messages, and error bodies."""

from collections.abc import Iterator
from typing import Any

import msgspec

from gyre.proxy.errors import CallError, ContextOverflow, Fault

_TEXTS = frozenset({"text", "input_text", "output_text", "reasoning_text", "summary_text"})


class Part(msgspec.Struct):
    type: str
    text: str = ""
    refusal: str = ""


Content = str | list[Part] | None


def texts(content: Content) -> Iterator[str]:
    """The texts of a message's parts; what the policy cannot read stays visible as a gap."""
    if content is None:
        return
    if isinstance(content, str):
        yield content
        return
    for part in content:
        yield part.text if part.type in _TEXTS else part.refusal or f"[{part.type} omitted]"


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
