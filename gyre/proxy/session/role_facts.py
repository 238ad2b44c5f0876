"""What role classification may know about a request, read from its wire form. Pure."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType
from typing import Any

import msgspec

from gyre.chat.conversation import Message
from gyre.proxy.dialects.base import WireRequest
from gyre.trajectory.roles import CallFacts, RoleMarkers, is_canned

_MAX_JSON = 16_384


def call_facts(
    wire: WireRequest, main_system: str, markers: RoleMarkers, callers: Mapping[str, str] = MappingProxyType({})
) -> CallFacts:
    """`main_system` is the system prompt of the execution's first main call, or ""; `callers` maps the tool calls that
    its sub-agents made, by id, to the ids of these agents."""
    facts, conversation = wire.facts, wire.conversation
    users = [message.text for message in conversation.messages if message.role == "user"]
    before = takewhile(lambda m: m.role != "assistant" or is_canned(markers, m.text), conversation.messages)
    return CallFacts(
        model=facts.model,
        headers=facts.headers,
        metadata={**_flat(facts.headers), **_flat(facts.metadata)},
        system=system_text(wire),
        first_user="\n".join(message.text for message in before if message.role == "user"),
        last_user=users[-1] if users else "",
        tools=len(conversation.tools),
        stream=facts.stream,
        main_system=main_system,
        known_agents=frozenset(callers.values()),
        history_agent=callers.get(_last_tool_call(conversation.messages), ""),
    )


def _last_tool_call(messages: Sequence[Message]) -> str:
    return next((message.tool_calls[0].id for message in reversed(messages) if message.tool_calls), "")


def system_text(wire: WireRequest) -> str:
    """The system prompt before the first turn, transport blocks included: they carry markers too."""
    leading = takewhile(lambda message: message.role == "system", wire.conversation.messages)
    return "\n".join([*wire.facts.transport_system, *(message.text for message in leading)])


def _flat(values: Mapping[str, Any]) -> dict[str, str]:
    """Scalars as text; the fields of values that are JSON objects in a string, as harnesses nest them."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        if not isinstance(value, str):
            if isinstance(value, bool | int | float):
                flat[name] = str(value)
            continue
        if not value.startswith("{") or len(value) > _MAX_JSON:
            flat[name] = value
            continue
        try:
            nested = msgspec.json.decode(value, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            continue
        flat.update({key: item for key, item in nested.items() if isinstance(item, str)})
    return flat
