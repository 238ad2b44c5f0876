"""Canonical messages in the form that chat templates read (the OpenAI chat format), with the quirks of two families."""

from collections.abc import Sequence
from typing import Any

from gyre.chat.calls.parsed_call import call_arguments, can_be_sent
from gyre.chat.conversation import Message, Tool


def wire_messages(messages: Sequence[Message], start: int) -> list[dict[str, Any]]:
    """`messages[start:]` in the form that templates read. Tool messages carry the name of the tool that they answer."""
    first = start
    while first > 0 and messages[first - 1].role != "assistant":
        first -= 1
    names: dict[str, str] = {}
    wire = []
    for index in range(max(first - 1, 0), len(messages)):
        message = messages[index]
        names.update((call.id, call.name) for call in message.tool_calls)
        if index >= start:
            wire.append(_wire_message(message, names))
    return wire


def _wire_message(message: Message, names: dict[str, str]) -> dict[str, Any]:
    wire: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning:
        wire["reasoning_content"] = message.reasoning
    if message.tool_calls:
        wire["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": _mapping(call.arguments)}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        wire["tool_call_id"] = message.tool_call_id
        wire["name"] = names.get(message.tool_call_id, "tool")
    return wire


def kimi_ids(messages: Sequence[Message]) -> dict[str, str]:
    """Issued id → the one that Kimi writes itself and reads again in the result: functions.NAME:INDEX, counted from the
    start. For calls whose tokens are not at hand."""
    calls = [call for message in messages for call in message.tool_calls]
    return {call.id: f"functions.{call.name}:{index}" for index, call in enumerate(calls)}


def with_ids(message: dict[str, Any], ids: dict[str, str]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {**message, "tool_call_id": ids.get(message["tool_call_id"], message["tool_call_id"])}
    calls = [{**call, "id": ids[call["id"]]} for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls} if calls else message


def one_call_each(message: dict[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls", [])
    if len(calls) < 2:
        return [message]
    return [
        {**message, "content": message["content"] if i == 0 else "", "tool_calls": [c]} for i, c in enumerate(calls)
    ]


def _mapping(arguments: dict[str, Any] | str) -> dict[str, Any]:
    parsed = call_arguments(arguments)
    return parsed if isinstance(parsed, dict) and can_be_sent("", parsed) else {"raw": arguments}


def wire_tools(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
        }
        for tool in tools
    ]
