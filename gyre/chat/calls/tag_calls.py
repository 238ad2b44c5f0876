"""Reading calls whose values stand between tags (Qwen 3.5, GLM, MiniMax, DeepSeek V4).

Nothing is escaped in a value, so code may hold the very tags that end it. The readings are:

* *flat*: a value ends at the first closing tag after which the markup goes on. `</parameter>` in the middle of a line
  of code is code.
* *nested*: the same, but a value that opens a tag of its own also closes it. A value may be a whole call.

Where the readings differ and both, or neither, leave nothing over, the call cannot be read: it is not guessed at. A
closing tag that no reading uses says that some value ended too early, so no call before it counts.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gyre.chat.calls.markup import TaggedText, TagMarkup
from gyre.chat.calls.parsed_call import ParsedCall, can_be_sent
from gyre.chat.calls.schema_values import value_of
from gyre.chat.conversation import Tool
from gyre.chat.lexer import Lexeme

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


class _Patterns:
    """The markup over marked text."""

    def __init__(self, markup: TagMarkup, text: TaggedText) -> None:
        def compiled(expression: str) -> re.Pattern[str]:
            return re.compile(text.pattern(expression))

        self.own_lines = markup.own_lines
        self.block_open = compiled(markup.block_open)
        self.block_close = compiled(markup.block_close)
        self.call_open = compiled(markup.call_open)
        self.call_close = compiled(markup.call_close)
        self.value_open = compiled(markup.value_open)
        self.edge = compiled(f"(?P<opens>{markup.value_open})|{markup.value_close}")
        ends = markup.block_close
        if markup.call_close:
            ends = rf"{markup.call_close}\s*(?:{markup.call_open}|{ends})"
        self.goes_on = compiled(rf"\s*(?:{markup.value_open}|{ends})")


class TagReader:
    """For one way of writing and one tokenizer. Time is linear in the text."""

    def __init__(self, markup: TagMarkup, tokens: frozenset[str]) -> None:
        """`tokens`: the tags that are tokens of the tokenizer."""
        self._text = TaggedText(markup.tags, tokens)
        self._patterns = _Patterns(markup, self._text)

    def read(self, tail: Sequence[Lexeme], tools: Sequence[Tool]) -> tuple[ParsedCall, ...]:
        """Every attempt at a call in the tail of a turn."""
        text = self._text.mark(tail)
        calls = _Reading(self._patterns, text, nested=False).calls()
        if any(self._patterns.value_open.search(value.text) for call in calls for value in call.values):
            calls = _decided(calls, _Reading(self._patterns, text, nested=True).calls())
        schemas = {tool.name: tool.parameters for tool in tools}
        return tuple(self._parsed(call, schemas) for call in calls)

    def _parsed(self, call: _Call, schemas: Mapping[str, dict[str, Any]]) -> ParsedCall:
        name, raw = self._text.written(call.name), self._text.written(call.raw)
        schema = schemas.get(name, {})
        arguments = {}
        for value in call.values:
            key = self._text.written(value.name)
            arguments[key] = value_of(self._text.written(value.text), schema, key, said=value.said)
        ok = call.ok and can_be_sent(name, arguments)
        return ParsedCall(name=name, arguments=arguments if ok else raw, raw=raw, ok=ok)


class _Reading:
    """One reading of one text."""

    def __init__(self, patterns: _Patterns, text: str, *, nested: bool) -> None:
        self._patterns = patterns
        self._text = text
        self._nested = nested
        closings = (edge for edge in patterns.edge.finditer(text) if edge["opens"] is None)
        self._last_end = max(
            (edge.start() for edge in closings if patterns.goes_on.match(text, edge.end())), default=-1
        )
        """Behind it no value ends: a policy that repeats an opening tag costs one pass, not one for each."""

    def calls(self) -> list[_Call]:
        text, patterns = self._text, self._patterns
        calls: list[_Call] = []
        end = 0
        while opened := patterns.block_open.search(text, end):
            calls = self._trusted(calls, text[end : opened.start()])
            try:
                block, end = self._block(opened.start(), opened.end())
            except _Unreadable as error:
                closed = patterns.block_close.search(text, error.at)
                end = closed.end() if closed else len(text)
                raw = text[opened.start() : end]
                calls = [*self._trusted(calls, raw), _Call(error.name, (), raw, ok=False)]
                if self._nested:
                    return calls  # it is of use whole or not at all
            else:
                calls += block
        return self._trusted(calls, text[end:])

    def _trusted(self, calls: list[_Call], unread: str) -> list[_Call]:
        """The calls before a text in which no call was read."""
        edges = [edge["opens"] is not None for edge in self._patterns.edge.finditer(unread)]
        if edges.count(False) > edges.count(True):
            return [call._replace(ok=False) for call in calls]
        return calls

    def _block(self, start: int, at: int) -> tuple[list[_Call], int]:
        """The calls of a block whose opening tag ends at `at`, and where its closing tag ends."""
        calls: list[_Call] = []
        while True:
            opened = self._patterns.call_open.match(self._text, self._after_blanks(at))
            if opened is None:
                raise _Unreadable(at)
            values, at = self._values(opened.end(), opened[1])
            calls.append(_Call(opened[1], values, self._text[start:at], ok=True))
            at = self._after_blanks(at)
            closed = self._patterns.block_close.match(self._text, at)
            if closed:
                return calls, closed.end()
            start = at

    def _values(self, at: int, name: str) -> tuple[tuple[_Value, ...], int]:
        values: dict[str, _Value] = {}
        value_open = self._patterns.value_open
        while opened := value_open.match(self._text, at := self._after_blanks(at)):
            end, after = self._value_end(opened.end())
            if end < 0 or opened[1] in values:
                raise _Unreadable(opened.end(), name)
            written = self._text[opened.end() : end]
            if self._patterns.own_lines:
                written = written.removeprefix("\n").removesuffix("\n")
            said = _SAID[opened[2]] if value_open.groups > 1 else ""
            values[opened[1]] = _Value(opened[1], said, written)
            at = after
        closed = self._patterns.call_close.match(self._text, at)
        if closed is None:
            raise _Unreadable(at, name)
        return tuple(values.values()), closed.end()

    def _value_end(self, at: int) -> tuple[int, int]:
        """Where the closing tag of a value begins and ends; -1 where there is none."""
        depth = 0
        for edge in self._patterns.edge.finditer(self._text, at) if at <= self._last_end else ():
            if edge["opens"] is not None:
                depth += self._nested
            elif depth:
                depth -= 1
            elif self._patterns.goes_on.match(self._text, edge.end()):
                return edge.start(), edge.end()
        return -1, -1

    def _after_blanks(self, at: int) -> int:
        while at < len(self._text) and self._text[at].isspace():
            at += 1
        return at


def _decided(flat: list[_Call], nested: list[_Call]) -> list[_Call]:
    whole = [all(call.ok for call in reading) for reading in (flat, nested)]
    if whole == [True, True] and flat != nested:
        return [call._replace(ok=False) for call in flat]
    return nested if whole == [False, True] else flat
