"""The canonical conversation: what every wire dialect is translated to, and what templates are rendered from.

Canonical form (docs/harnesses.md): content is one string per message (text blocks joined by a newline,
empty and whitespace-only blocks dropped), arguments are parsed objects, transport fields (cache_control, metadata) are
gone.
"""

from typing import Any, Literal

import msgspec

MAX_DEPTH = 64
"""Nesting allowed in tool arguments and schemas, sampled or received: templates recurse over them."""


def is_shallow(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether a JSON value is nested no deeper than `depth` levels."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(depth):
        if not level:
            break
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, dict | list)
        ]
    return not any(level)


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    """Issued by the proxy for sampled calls; a foreign id marks a call that this policy did not sample here."""
    name: str
    arguments: dict[str, Any] | str
    """A string only when the policy's text did not parse."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """Assistant only."""
    tool_call_id: str = ""
    """Tool only: the call that this message answers."""


class Tool(msgspec.Struct, frozen=True):
    name: str
    description: str
    parameters: dict[str, Any]


class Conversation(msgspec.Struct, frozen=True):
    """A complete request: the policy is asked for the next assistant message."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
