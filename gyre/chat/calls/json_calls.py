"""Reading calls whose arguments are JSON between tags (Qwen 3, Kimi, DeepSeek V3, tools as text).

JSON ends by itself, so a closing tag inside one of its strings is part of that string.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from gyre.chat.calls.markup import JsonMarkup, TaggedText
from gyre.chat.calls.parsed_call import ParsedCall, call_arguments, can_be_sent
from gyre.chat.lexer import Lexeme

_JSON = json.JSONDecoder()


class JsonReader:
    """For one way of writing and one tokenizer."""

    def __init__(self, markup: JsonMarkup, tokens: frozenset[str]) -> None:
        """`tokens`: the tags that are tokens of the tokenizer."""
        self._text = TaggedText(markup.tags, tokens)
        self._payload = markup.payload
        self._open = self._pattern(re.escape(markup.tags[0]))
        self._close = self._pattern(re.escape(markup.tags[-1]))
        self._before = self._pattern(markup.before)
        self._after = self._pattern(markup.after)

    def read(self, tail: Sequence[Lexeme]) -> tuple[ParsedCall, ...]:
        """Every attempt at a call in the tail of a turn."""
        text = self._text.mark(tail)
        calls: list[ParsedCall] = []
        end = 0
        while opened := self._open.search(text, end):
            call, end = self._call(text, opened.start())
            calls.append(call)
        return tuple(calls)

    def _call(self, text: str, start: int) -> tuple[ParsedCall, int]:
        """The call that begins at `start`, and where it ends: an unreadable one at the next closing tag."""
        before = self._before.match(text, start)
        groups = before.groupdict() if before else {}
        name, call_id = groups.get("name") or "", groups.get("id") or ""
        if before:
            payload, at = self._value(text, before.end())
            after = self._after.match(text, at)
            if after:
                raw = self._text.written(text[start : after.end()])
                arguments: Any = payload
                if self._payload == "call":
                    name, arguments = _call_of(payload)
                arguments = call_arguments(arguments)
                ok = bool(name) and can_be_sent(name, arguments)
                call = ParsedCall(name=name, arguments=arguments if ok else raw, raw=raw, ok=ok, id=call_id)
                return call, after.end()
        closed = self._close.search(text, start)
        end = closed.end() if closed else len(text)
        raw = self._text.written(text[start:end])
        return ParsedCall(name=name, arguments=raw, raw=raw, ok=False, id=call_id), end

    def _value(self, text: str, at: int) -> tuple[Any, int]:
        """The JSON at `at` and where it ends; a call without any has no arguments."""
        try:
            value, end = _JSON.raw_decode(text, at)
            written = self._text.written(text[at:end])
            return (json.loads(written) if len(written) > end - at else value), end
        except (ValueError, RecursionError):
            # A policy that repeats itself writes numbers of thousands of digits and brackets without end.
            return {}, at

    def _pattern(self, expression: str) -> re.Pattern[str]:
        return re.compile(self._text.pattern(expression))


def _call_of(payload: Any) -> tuple[str, Any]:
    if not isinstance(payload, dict) or not isinstance(payload.get("name"), str):
        return "", payload
    return payload["name"], payload.get("arguments", {})
