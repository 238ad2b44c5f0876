"""When are two messages the same? Harnesses rewrite what they echo (docs/harnesses.md); tokens must not care.

Emitted assistant turns are compared with their echoes by meaning: arguments as parsed objects the way JavaScript would
re-serialise them, text without whitespace. The first echo of a turn may differ from it in the payload of its calls and
in its reasoning, which is how harnesses rewrite; later ones may not differ from the first. Every difference is named
and counted.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

from gyre.chat.conversation import Message, ToolCall, is_shallow

BILLING_PREFIX = "x-anthropic-billing-header:"
"""A system block that starts with this changes between requests of one conversation and says nothing to the policy."""

_EXACT_INTEGERS = 2**53


def drop_billing(system_blocks: Sequence[str]) -> list[str]:
    """System text blocks without Claude Code's billing block (it differs per sub-agent and after compaction)."""
    return [block for block in system_blocks if not block.startswith(BILLING_PREFIX)]


def canonical_value(value: Any) -> Any:
    """A JSON value as it looks after JavaScript parsed and re-serialised it; keys sorted.

    10000.0 → 10000, -0.0 → 0, integers beyond 2^53 → their nearest double, infinities and NaN → null."""
    if isinstance(value, dict):
        return {str(key): canonical_value(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [canonical_value(item) for item in value]
    if not isinstance(value, int | float):
        return value
    if isinstance(value, int) and abs(value) <= _EXACT_INTEGERS:
        return value
    try:
        number = float(value)
    except OverflowError:
        return None
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() else number


def canonical_arguments(arguments: dict[str, Any] | str) -> str:
    """A text that two argument objects share exactly when they mean the same. A JSON text counts as its object, unless
    it is nested deeper than arguments may be."""
    value: Any = arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = arguments
        value = parsed if is_shallow(parsed) else arguments
    return json.dumps(canonical_value(value), ensure_ascii=False, separators=(",", ":"))


def canonical_turn(message: Message) -> str:
    """Key of an assistant turn by content: trimmed text and calls without ids; reasoning is ignored."""
    calls = [[call.name, canonical_arguments(call.arguments)] for call in message.tool_calls]
    return json.dumps([message.text.strip(), calls], ensure_ascii=False)


def echo_form(message: Message) -> str:
    """Equal for two copies of an assistant turn when a harness changed nothing between them: the same words, the same
    thoughts, and under each call id the same payload, in any order."""
    calls = sorted([call.id, call.name, canonical_arguments(call.arguments)] for call in message.tool_calls)
    return json.dumps([_words(message.text), _words(message.reasoning), calls], ensure_ascii=False)


def same_payload(call: ToolCall, other: ToolCall) -> bool:
    return call.name == other.name and (
        call.arguments == other.arguments or canonical_arguments(call.arguments) == canonical_arguments(other.arguments)
    )


def is_edited(emitted: Message, echo: Message | None, copy: Message) -> bool:
    """Whether `copy`, which a history has in the place of the turn `emitted`, is more than that turn rewritten. `echo`
    is the turn as it first came back; None when `copy` is the first to do so."""
    if echo is None:
        return emitted.text != copy.text and _words(emitted.text) != _words(copy.text)
    return echo != copy and echo_form(echo) != echo_form(copy)


def _words(text: str) -> str:
    """What a text says: harnesses trim texts and join them in other ways."""
    return "".join(text.split())


def without_blank_turns(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Without assistant messages that say nothing: opencode leaves one behind for a stream that was cut."""
    said = tuple([m for m in messages if m.role != "assistant" or m.tool_calls or _says_something(m)])
    return said if len(said) < len(messages) else messages


def _says_something(message: Message) -> bool:
    return bool(message.text.strip() or message.reasoning.strip())


def same_context(stored: Message, incoming: Message) -> bool:
    """Whether a message that the policy did not emit (system, user, tool, foreign assistant) is unchanged."""
    if stored == incoming:
        return True
    if stored.role != incoming.role or stored.tool_call_id != incoming.tool_call_id:
        return False
    if stored.role == "assistant":
        same_thoughts = _words(stored.reasoning) == _words(incoming.reasoning)
        return same_thoughts and canonical_turn(stored) == canonical_turn(incoming)
    return stored.text.strip() == incoming.text.strip()


def same_turn(emitted: Message, echoed: Message) -> bool:
    """Whether `echoed` is the whole turn `emitted`, however rewritten.

    A turn with calls is identified by its call ids: all of them, no other, in any order. A turn without calls is
    identified by its text."""
    if emitted == echoed:
        return True
    if emitted.tool_calls or echoed.tool_calls:
        return {call.id for call in emitted.tool_calls} == {call.id for call in echoed.tool_calls}
    return emitted.text.strip() == echoed.text.strip()


def drift_kinds(emitted: Message, echoed: Message) -> dict[str, int]:
    """Differences between a turn and its echo, counted by kind:

    text_whitespace, text_dropped, text_added, text_changed; reasoning_whitespace, reasoning_dropped, reasoning_changed;
    call_dropped, call_added, call_order, call_renamed; and per call at most one of args_unparsed (the echo is not an
    object), args_form (same meaning, another spelling or key order), args_default_added, args_changed."""
    kinds: dict[str, int] = {}
    for name, before, after in (
        ("text", emitted.text, echoed.text),
        ("reasoning", emitted.reasoning, echoed.reasoning),
    ):
        kind = _text_drift(before, after)
        if kind:
            _count(kinds, f"{name}_{kind}")
    echoes = {call.id: call for call in echoed.tool_calls}
    known = {call.id for call in emitted.tool_calls}
    _count(kinds, "call_dropped", len(known - echoes.keys()))
    _count(kinds, "call_added", len(echoes.keys() - known))
    kept = [call.id for call in emitted.tool_calls if call.id in echoes]
    if kept != [call.id for call in echoed.tool_calls if call.id in known]:
        _count(kinds, "call_order")
    for call in emitted.tool_calls:
        echo = echoes.get(call.id)
        if echo is not None:
            _count(kinds, "call_renamed", int(echo.name != call.name))
            kind = _argument_drift(call, echo)
            if kind:
                _count(kinds, kind)
    return kinds


def _text_drift(before: str, after: str) -> str:
    if before == after:
        return ""
    if _words(before) == _words(after):
        return "whitespace"
    if not after.strip():
        return "dropped"
    return "added" if not before.strip() else "changed"


def _argument_drift(call: ToolCall, echo: ToolCall) -> str:
    if type(call.arguments) is type(echo.arguments) and _spelling(call) == _spelling(echo):
        return ""
    if canonical_arguments(call.arguments) == canonical_arguments(echo.arguments):
        return "args_form"
    if isinstance(echo.arguments, str):
        return "args_unparsed"
    if isinstance(call.arguments, dict) and call.arguments.keys() < echo.arguments.keys():
        rest = {key: echo.arguments[key] for key in call.arguments}
        if canonical_arguments(rest) == canonical_arguments(call.arguments):
            return "args_default_added"
    return "args_changed"


def _spelling(call: ToolCall) -> str:
    return json.dumps(call.arguments, ensure_ascii=False)


def _count(kinds: dict[str, int], kind: str, n: int = 1) -> None:
    if n:
        kinds[kind] = kinds.get(kind, 0) + n
