"""Why a model call is refused or fails. Each dialect turns a `CallError` into its API's native shape."""

from enum import StrEnum

from gyre.core.errors import GyreError


class Fault(StrEnum):
    INVALID = "invalid"
    """The request itself is wrong; repeating it cannot help."""
    UNAUTHORIZED = "unauthorized"
    NOT_FOUND = "not_found"
    CLOSED = "closed"
    """The execution of this session has ended."""
    TOO_LARGE = "too_large"
    TOO_SLOW = "too_slow"
    """The request did not arrive in time."""
    OVERFLOW = "overflow"
    """The prompt does not fit the policy's context; harnesses compact on it."""
    BUSY = "busy"
    """Too many calls of this session at once; the harness should wait."""
    UNAVAILABLE = "unavailable"
    """No engine could serve the call before its deadline."""
    INTERNAL = "internal"


STATUS: dict[Fault, int] = {
    Fault.INVALID: 400,
    Fault.UNAUTHORIZED: 401,
    Fault.NOT_FOUND: 404,
    Fault.CLOSED: 410,
    Fault.TOO_LARGE: 413,
    Fault.TOO_SLOW: 408,
    Fault.OVERFLOW: 400,
    Fault.BUSY: 429,
    Fault.UNAVAILABLE: 503,
    Fault.INTERNAL: 500,
}


class CallError(GyreError):
    """A call answered with an error. `retry_after_s` is set for faults that pass, `final` for those that never do."""

    def __init__(self, fault: Fault, message: str, *, retry_after_s: int | None = None, final: bool = False) -> None:
        super().__init__(message)
        self.fault = fault
        self.message = message
        self.retry_after_s = retry_after_s
        self.final = final


class ContextOverflow(CallError):
    """The prompt leaves no room for a single output token."""

    def __init__(self, prompt_tokens: int, max_context: int) -> None:
        super().__init__(Fault.OVERFLOW, f"prompt is too long: {prompt_tokens} tokens > {max_context} maximum")
        self.prompt_tokens = prompt_tokens
        self.max_context = max_context
