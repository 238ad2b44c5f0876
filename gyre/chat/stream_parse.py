"""Reading a sampled turn while it is being produced (issue 3: tokens reach the harness as they are sampled).

`StreamingParse` is the only parser: parsing a whole turn is feeding it once. What it yields is stable: no later token
changes or takes back a delta.

Rules. Reasoning and text are stripped of surrounding whitespace. Text is what precedes the first tool call. Calls are
known when the turn has ended: when none of them parses, everything from the first marker on is text, because an
unparsed call stays policy text (case T18); when some parse, the others are reported with ok=False and are not shown.
"""

from collections.abc import Callable, Sequence

import msgspec

from gyre.chat.calls.parsed_call import ParsedCall
from gyre.chat.lexer import Lexeme, Lexer
from gyre.chat.syntax import Shown, Syntax


class ParsedTurn(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    reasoning: str
    calls: tuple[ParsedCall, ...]
    """Every attempt in order; those with ok=True are what the harness is given."""

    @property
    def good_calls(self) -> tuple[ParsedCall, ...]:
        return tuple(call for call in self.calls if call.ok)

    @property
    def flags(self) -> list[str]:
        """For the call record."""
        return ["unparsed_tool_call"] if any(not call.ok for call in self.calls) else []


class StreamDelta(msgspec.Struct, frozen=True):
    """What became certain. Reasoning comes before text."""

    reasoning: str = ""
    text: str = ""

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.text)


class _Stripped:
    """Text that grows, without whitespace at its start; whitespace waits until something follows it."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._blank = ""

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def add(self, text: str) -> str:
        """What is new for the reader."""
        fresh = self._blank + text if self._parts else text.lstrip()
        body = fresh.rstrip()
        self._blank = fresh[len(body) :]
        if body:
            self._parts.append(body)
        return body


class StreamingParse:
    """Feed output ids in any chunks, then `finish`; afterwards `turn` is the parsed turn."""

    def __init__(
        self,
        lexer: Lexer,
        syntax: Syntax,
        stop: frozenset[int],
        read_calls: Callable[[list[int], Sequence[Lexeme]], tuple[ParsedCall, ...]],
    ) -> None:
        """`read_calls` gives every attempt at a call, from the ids of the whole turn, its stop token included, and from
        the lexemes of its tail."""
        self._lexer = lexer
        self._syntax = syntax
        self._stop = stop
        self._read_calls = read_calls
        self._ids: list[int] = []
        self._ended = False
        self._reasoning = _Stripped()
        self._text = _Stripped()
        self._turn: ParsedTurn | None = None

    @property
    def turn(self) -> ParsedTurn:
        assert self._turn is not None, "finish() first"
        return self._turn

    def feed(self, output_ids: Sequence[int]) -> StreamDelta:
        """Ids after a stop token are ignored: a policy cannot speak after the end of its turn."""
        if self._ended:
            return StreamDelta()
        end = next((i for i, token in enumerate(output_ids) if token in self._stop), len(output_ids))
        self._ended = end < len(output_ids)
        self._ids += output_ids[: end + 1]
        return self._show(self._lexer.feed(output_ids[:end]))

    def finish(self) -> StreamDelta:
        """Everything that waited for more. Call once."""
        last = self._show(self._lexer.finish())
        held = self._add(self._syntax.finish())
        reasoning, text = last.reasoning + held.reasoning, last.text + held.text
        calls: tuple[ParsedCall, ...] = ()
        if self._syntax.tail:
            tail = "".join(lexeme.text for lexeme in self._syntax.tail)
            calls = self._read_calls(self._ids, self._syntax.tail)
            if not any(call.ok for call in calls):
                text += self._text.add(tail)
                if not calls and self._syntax.attempted:
                    calls = (ParsedCall(name="", arguments=tail, raw=tail, ok=False),)
        self._turn = ParsedTurn(text=self._text.text, reasoning=self._reasoning.text, calls=calls)
        return StreamDelta(reasoning, text)

    def _show(self, lexemes: list[Lexeme]) -> StreamDelta:
        deltas = [self._add(self._syntax.take(lexeme)) for lexeme in lexemes]
        return StreamDelta("".join(d.reasoning for d in deltas), "".join(d.text for d in deltas))

    def _add(self, shown: Shown) -> StreamDelta:
        return StreamDelta(self._reasoning.add(shown.reasoning), self._text.add(shown.text))
