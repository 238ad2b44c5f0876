"""Event stream of the Responses API.

Codex commits an item to its history at `response.output_item.done`, executes it, and keeps it even when the stream then
breaks. So every `output_item.done` goes out in `end`, after the turn is recorded.
"""

from typing import Any

from gyre.proxy.dialects.base import Delta, RequestFacts, TurnEnd, TurnHead, sse
from gyre.proxy.dialects.openai import error_object
from gyre.proxy.dialects.responses_items import (
    call_item,
    envelope,
    finished,
    message_item,
    output_items,
    reasoning_item,
    text_part,
)
from gyre.proxy.errors import CallError

Json = dict[str, Any]


class ResponsesStream:
    def __init__(self, request: RequestFacts, head: TurnHead) -> None:
        self._request = request
        self._head = head
        self._sequence = -1
        self._reasoning_at: int | None = None
        self._message_at: int | None = None
        self._items = 0

    def start(self) -> bytes:
        response = envelope(self._head)
        return self._event("response.created", response=response) + self.keep_alive()

    def keep_alive(self) -> bytes:
        # Comments do not reset Codex's idle timer; a repeated state does.
        return self._event("response.in_progress", response=envelope(self._head))

    def delta(self, delta: Delta) -> bytes:
        return self._reasoning(delta.reasoning) if delta.reasoning else self._text(delta.text)

    def end(self, end: TurnEnd) -> bytes:
        out = []
        if self._reasoning_at is not None:
            out.append(self._close_reasoning(self._reasoning_at, end.message.reasoning))
        if self._message_at is not None:
            out.append(self._close_message(self._message_at, end.message.text))
        for index, call in enumerate(end.message.tool_calls):
            out.append(self._call(call_item(self._request, self._head, call, index)))
        status = finished(end)
        output = output_items(self._request, self._head, end.message)
        response = {**envelope(self._head), **status, "output": output}
        out.append(self._event(f"response.{status['status']}", response=response))
        return b"".join(out)

    def error(self, error: CallError) -> bytes:
        shown = error_object(error)
        reason = {"code": shown["code"] or shown["type"], "message": shown["message"]}
        response = {**envelope(self._head), "status": "failed", "error": reason}
        return self._event("response.failed", response=response)

    def _reasoning(self, text: str) -> bytes:
        out = b""
        if self._reasoning_at is None:
            at = self._reasoning_at = self._take_index()
            out = self._event("response.output_item.added", output_index=at, item=reasoning_item(self._head, None))
            part = {"type": "summary_text", "text": ""}
            out += self._summary("response.reasoning_summary_part.added", at, part=part)
        return out + self._summary("response.reasoning_summary_text.delta", self._reasoning_at, delta=text)

    def _text(self, text: str) -> bytes:
        out = b""
        if self._message_at is None:
            at = self._message_at = self._take_index()
            out = self._event("response.output_item.added", output_index=at, item=message_item(self._head, None))
            out += self._content("response.content_part.added", at, part=text_part(""))
        return out + self._content("response.output_text.delta", self._message_at, delta=text, logprobs=[])

    def _close_reasoning(self, at: int, text: str) -> bytes:
        item = reasoning_item(self._head, text)
        return (
            self._summary("response.reasoning_summary_text.done", at, text=text)
            + self._summary("response.reasoning_summary_part.done", at, part=item["summary"][0])
            + self._event("response.output_item.done", output_index=at, item=item)
        )

    def _close_message(self, at: int, text: str) -> bytes:
        return (
            self._content("response.output_text.done", at, text=text, logprobs=[])
            + self._content("response.content_part.done", at, part=text_part(text))
            + self._event("response.output_item.done", output_index=at, item=message_item(self._head, text))
        )

    def _call(self, item: Json) -> bytes:
        at = self._take_index()
        field, event = (
            ("input", "custom_tool_call_input") if "input" in item else ("arguments", "function_call_arguments")
        )
        begun = {**item, field: "", "status": "in_progress"}
        place = {"output_index": at, "item_id": item["id"]}
        return (
            self._event("response.output_item.added", output_index=at, item=begun)
            + self._event(f"response.{event}.delta", **place, delta=item[field])
            + self._event(f"response.{event}.done", **place, **{field: item[field]}, name=item["name"])
            + self._event("response.output_item.done", output_index=at, item=item)
        )

    def _summary(self, kind: str, at: int, **fields: Any) -> bytes:
        return self._event(kind, output_index=at, item_id=f"rs_{self._head.id}", summary_index=0, **fields)

    def _content(self, kind: str, at: int, **fields: Any) -> bytes:
        return self._event(kind, output_index=at, item_id=f"msg_{self._head.id}", content_index=0, **fields)

    def _take_index(self) -> int:
        self._items += 1
        return self._items - 1

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return sse({"type": kind, **fields, "sequence_number": self._sequence}, kind)
