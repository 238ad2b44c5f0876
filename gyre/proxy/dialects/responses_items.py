"""Output items of the Responses API, as they look when complete."""

from typing import Any

from gyre.chat.conversation import Message, ToolCall
from gyre.proxy.dialects.base import RequestFacts, ToolForm, TurnEnd, TurnHead, Usage, arguments_text

Json = dict[str, Any]


def envelope(head: TurnHead) -> Json:
    """The response object before any output."""
    return {
        "id": f"resp_{head.id}",
        "object": "response",
        "created_at": head.created,
        "model": head.model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def finished(end: TurnEnd) -> Json:
    """The fields of the response object that change when the turn is complete."""
    cut = end.finish == "length"
    return {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "usage": _usage(end.usage),
    }


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.output,
        # The schema wants the field; reasoning is counted as output and not on its own.
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.output,
    }


def output_items(request: RequestFacts, head: TurnHead, message: Message) -> list[Json]:
    """Reasoning, then the text message, then the calls; parts that are empty are absent."""
    items = []
    if message.reasoning:
        items.append(reasoning_item(head, message.reasoning))
    if message.text:
        items.append(message_item(head, message.text))
    for index, call in enumerate(message.tool_calls):
        items.append(call_item(request, head, call, index))
    return items


def reasoning_item(head: TurnHead, text: str | None) -> Json:
    """None: just begun."""
    summary = [] if text is None else [{"type": "summary_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{head.id}", "summary": summary, "encrypted_content": None}


def message_item(head: TurnHead, text: str | None) -> Json:
    """None: just begun."""
    return {
        "type": "message",
        "id": f"msg_{head.id}",
        "role": "assistant",
        "status": "in_progress" if text is None else "completed",
        "content": [] if text is None else [text_part(text)],
    }


def text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": []}


def call_item(request: RequestFacts, head: TurnHead, call: ToolCall, index: int) -> Json:
    """A function call, spelled in the form in which its tool was declared."""
    form = request.tool_forms.get(call.name) or ToolForm(call.name)
    item: Json = {
        "type": "function_call",
        "id": f"fc_{head.id}_{index}",
        "call_id": call.id,
        "name": form.name,
        "arguments": arguments_text(call),
        "status": "completed",
    }
    if form.custom:
        value = call.arguments.get("input") if isinstance(call.arguments, dict) else call.arguments
        item["type"], item["input"] = "custom_tool_call", value if isinstance(value, str) else item["arguments"]
        del item["arguments"]
    if form.namespace:
        item["namespace"] = form.namespace
    return item
