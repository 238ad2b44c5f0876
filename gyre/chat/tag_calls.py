"""Reading calls whose values stand between tags (Qwen 3.5, GLM, MiniMax, DeepSeek V4).

Nothing is escaped in a value, so code may hold the very tags that end it. The readings are:

* *flat*: a value ends at the first closing tag after which the markup goes on. `</parameter>` in the middle of a line
  of code is code.
* *nested*: the same, but a value that opens a tag of its own also closes it. A value may be a whole call.

Where the readings differ and both, or neither, leave nothing over, the call cannot be read: it is not guessed at. A
closing tag that no reading uses says that some value ended too early, so no call before it counts.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from gyre.chat.conversation import Tool
from gyre.chat.lexer import Lexeme
from gyre.chat.markup import TaggedText, TagMarkup
from gyre.chat.parsed_call import ParsedCall, can_be_sent
from gyre.chat.schema_values import value_of

_SAID = {"true": "text", "false": "json"}


class _Value(NamedTuple):
    name: str
    said: str
    text: str


class _Call(NamedTuple):
    name: str
    values: tuple[_Value, ...]
    raw: str
    ok: bool


class _Unreadable(Exception):
    """The markup does not go on at `at`, in a call of the tool `name` if it got that far."""

    def __init__(self, at: int, name: str = "") -> None:
        self.at = at
        self.name = name


class TagReader:
    """For one way of writing and one tokenizer. Time is linear in the text, but for values that open tags."""

    def __init__(self, markup: TagMarkup, tokens: frozenset[str]) -> None:
        """`tokens`: the tags that are tokens of the tokenizer."""
        self._text = TaggedText(markup.tags, tokens)
        self._own_lines = markup.own_lines
        self._block_open = self._pattern(markup.block_open)
        self._block_close = self._pattern(markup.block_close)
        self._call_open = self._pattern(markup.call_open)
        self._call_close = self._pattern(markup.call_close)
        self._value_open = self._pattern(markup.value_open)
        self._edge = self._pattern(f"(?P<opens>{markup.value_open})|{markup.value_close}")
        ends = rf"{markup.call_close}\s*(?:{markup.call_open}|{markup.block_close})"
        self._goes_on = self._pattern(
            rf"\s*(?:{markup.value_open}|{ends if markup.call_close else markup.block_close})"
        )

    def read(self, tail: Sequence[Lexeme], tools: Sequence[Tool]) -> tuple[ParsedCall, ...]:
        """Every attempt at a call in the tail of a turn."""
        text = self._text.mark(tail)
        calls = self._read(text, nested=False)
        if any(self._value_open.search(value.text) for call in calls for value in call.values):
            calls = _decided(calls, self._read(text, nested=True))
        schemas = {tool.name: tool.parameters for tool in tools}
        return tuple(self._parsed(call, schemas.get(call.name, {})) for call in calls)

    def _parsed(self, call: _Call, schema: dict[str, Any]) -> ParsedCall:
        arguments = {
            value.name: value_of(self._text.written(value.text), schema, value.name, said=value.said)
            for value in call.values
        }
        raw = self._text.written(call.raw)
        ok = call.ok and can_be_sent(call.name, arguments)
        return ParsedCall(name=call.name, arguments=arguments if ok else raw, raw=raw, ok=ok)

    def _read(self, text: str, *, nested: bool) -> list[_Call]:
        calls: list[_Call] = []
        end = 0
        while opened := self._block_open.search(text, end):
            calls = self._trusted(calls, text[end : opened.start()])
            try:
                block, end = self._block(text, opened.start(), opened.end(), nested=nested)
            except _Unreadable as error:
                closed = self._block_close.search(text, error.at)
                end = closed.end() if closed else len(text)
                raw = text[opened.start() : end]
                calls = [*self._trusted(calls, raw), _Call(error.name, (), raw, ok=False)]
                if nested:
                    return calls  # it is of use whole or not at all
            else:
                calls += block
        return self._trusted(calls, text[end:])

    def _trusted(self, calls: list[_Call], unread: str) -> list[_Call]:
        """The calls before a text in which no call was read."""
        edges = [edge["opens"] is not None for edge in self._edge.finditer(unread)]
        if edges.count(False) > edges.count(True):
            return [call._replace(ok=False) for call in calls]
        return calls

    def _block(self, text: str, start: int, at: int, *, nested: bool) -> tuple[list[_Call], int]:
        """The calls of a block whose opening tag ends at `at`, and where its closing tag ends."""
        calls: list[_Call] = []
        while True:
            opened = self._call_open.match(text, _after_blanks(text, at))
            if opened is None:
                raise _Unreadable(at)
            name = self._text.written(opened[1])
            values, at = self._values(text, opened.end(), name, nested=nested)
            calls.append(_Call(name, values, text[start:at], ok=True))
            at = _after_blanks(text, at)
            closed = self._block_close.match(text, at)
            if closed:
                return calls, closed.end()
            start = at

    def _values(self, text: str, at: int, name: str, *, nested: bool) -> tuple[tuple[_Value, ...], int]:
        values: dict[str, _Value] = {}
        while opened := self._value_open.match(text, at := _after_blanks(text, at)):
            end, after = self._value_end(text, opened.end(), nested=nested)
            said = _SAID[opened[2]] if self._value_open.groups > 1 else ""
            key = self._text.written(opened[1])
            if end < 0 or key in values:
                raise _Unreadable(opened.end(), name)
            written = text[opened.end() : end]
            if self._own_lines:
                written = written.removeprefix("\n").removesuffix("\n")
            values[key] = _Value(key, said, written)
            at = after
        closed = self._call_close.match(text, at)
        if closed is None:
            raise _Unreadable(at, name)
        return tuple(values.values()), closed.end()

    def _value_end(self, text: str, at: int, *, nested: bool) -> tuple[int, int]:
        """Where the closing tag of a value begins and ends; -1 where there is none."""
        depth = 0
        for edge in self._edge.finditer(text, at):
            if edge["opens"] is not None:
                depth += nested
            elif depth:
                depth -= 1
            elif self._goes_on.match(text, edge.end()):
                return edge.start(), edge.end()
        return -1, -1

    def _pattern(self, expression: str) -> re.Pattern[str]:
        return re.compile(self._text.pattern(expression))


def _decided(flat: list[_Call], nested: list[_Call]) -> list[_Call]:
    whole = [all(call.ok for call in reading) for reading in (flat, nested)]
    if whole == [True, True] and flat != nested:
        return [call._replace(ok=False) for call in flat]
    return nested if whole == [False, True] else flat


def _after_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
