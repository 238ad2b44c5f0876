"""Reading a sampled turn while it is being produced (issue 3: tokens reach the harness as they are sampled).

`StreamingParse` is the only parser: parsing a whole turn is feeding it once. What it yields is stable – no later token
changes or takes back a delta – and never contains half a UTF-8 character or part of a marker.

Rules. Reasoning and text are stripped of surrounding whitespace. Text is what precedes the first tool call. When no
call of the turn parses, everything from the first marker on is text: an unparsed call stays policy text (case T18).
When some parse, the others are reported with ok=False and are not shown.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec


class ParsedCall(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: dict[str, Any] | str
    """A string (the raw block) only when ok is False."""
    raw: str
    """The block as the policy wrote it, without its markers where the family's parser drops them."""
    ok: bool


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
    """What became certain. Order inside a delta: reasoning, then text, then calls."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[ParsedCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.text or self.calls)


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """Markers of a family. With `tool_open` None (markers that are not single tokens) nothing is certain before the
    end, and the whole turn is yielded by `finish`."""

    decode: Callable[[list[int]], str]
    stop: frozenset[int]
    think_open: int | None
    think_close: int | None
    tool_open: int | None
    tool_close: int | None
    starts_in_reasoning: bool


class _Channel:
    """Decodes one stretch of tokens into stripped text, yielding only complete characters."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._pending: list[int] = []
        self._held = ""
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def feed(self, ids: list[int], *, last: bool = False) -> str:
        """The new text. Whitespace waits until something follows it; `last` releases incomplete characters."""
        self._pending += ids
        decoded = self._decode(self._pending) if self._pending else ""
        if decoded.endswith("\N{REPLACEMENT CHARACTER}") and not last:
            return ""
        self._pending = []
        fresh = self._held + decoded
        if not self._parts:
            fresh = fresh.lstrip()
        body = fresh.rstrip()
        self._held = fresh[len(body) :]
        if body:
            self._parts.append(body)
        return body


class StreamingParse:
    """Feed output ids in any chunks, then `finish`; afterwards `turn` is the parsed turn."""

    def __init__(self, grammar: Grammar, parse_whole: Callable[[list[int]], ParsedTurn]) -> None:
        self._grammar = grammar
        self._parse_whole = parse_whole
        self._ids: list[int] = []
        self._reasoning = _Channel(grammar.decode)
        self._text = _Channel(grammar.decode)
        self._state = "reasoning" if grammar.starts_in_reasoning else "start"
        self._calls_at: int | None = None
        """Index of the first tool marker; inside reasoning it counts only when no end of reasoning follows."""
        self._good: list[ParsedCall] = []
        self._ended = False
        self._turn: ParsedTurn | None = None

    @property
    def turn(self) -> ParsedTurn:
        assert self._turn is not None, "finish() first"
        return self._turn

    def feed(self, output_ids: Sequence[int]) -> StreamDelta:
        """Ids after a stop token are ignored: a policy cannot speak after the end of its turn."""
        grammar = self._grammar
        reasoning, text, closed_call = "", "", False
        run: list[int] = []  # tokens of the current channel that were not decoded yet
        for token in output_ids:
            if self._ended or token in grammar.stop:
                self._ended = True
                break
            self._ids.append(token)
            if grammar.tool_open is None:
                continue
            if self._state == "start":
                run.append(token)
                if token == grammar.think_open:
                    self._state, run = "reasoning", []
                elif token == grammar.tool_open:
                    self._state, self._calls_at, run = "calls", len(self._ids) - 1, []
                elif grammar.decode(run).strip():
                    self._state = "content"
            elif self._state == "reasoning":
                if token == grammar.think_close:
                    if self._calls_at is not None:
                        run += [t for t in self._ids[self._calls_at : -1] if t != grammar.think_open]
                        self._calls_at = None
                    reasoning += self._reasoning.feed(run, last=True)
                    self._state, run = "content", []
                elif self._calls_at is None:
                    if token == grammar.tool_open:
                        self._calls_at = len(self._ids) - 1
                    elif token != grammar.think_open:
                        run.append(token)
            elif self._state == "content":
                if token == grammar.tool_open:
                    text += self._text.feed(run)
                    self._state, self._calls_at, run = "calls", len(self._ids) - 1, []
                else:
                    run.append(token)
            else:
                closed_call |= token == grammar.tool_close
        if self._state == "reasoning":
            reasoning += self._reasoning.feed(run)
        elif self._state == "content":
            text += self._text.feed(run)
        return StreamDelta(reasoning, text, self._new_calls() if closed_call else ())

    def finish(self) -> StreamDelta:
        """Everything that waited for more. Call once."""
        if self._grammar.tool_open is None:
            self._turn = self._parse_whole(self._ids)
            return StreamDelta(self._turn.reasoning, self._turn.text, self._turn.good_calls)
        reasoning = self._reasoning.feed([], last=True)
        text = ""
        calls: tuple[ParsedCall, ...] = ()
        attempts: tuple[ParsedCall, ...] = ()
        if self._calls_at is not None:
            calls = self._new_calls()
            attempts = self._parse_whole(self._ids).calls
            if not self._good:
                unparsed = self._ids[self._calls_at :]
                text = self._text.feed(unparsed)
                if not attempts:
                    raw = self._grammar.decode(unparsed)
                    attempts = (ParsedCall(name="", arguments=raw, raw=raw, ok=False),)
        text += self._text.feed([], last=True)
        self._turn = ParsedTurn(text=self._text.text, reasoning=self._reasoning.text, calls=attempts)
        return StreamDelta(reasoning, text, calls)

    def _new_calls(self) -> tuple[ParsedCall, ...]:
        good = self._parse_whole(self._ids).good_calls
        fresh = good[len(self._good) :]
        self._good += fresh
        return fresh


def call_arguments(arguments: Any) -> dict[str, Any] | str:
    """Arguments as a mapping when they are one, or the JSON text of one; otherwise as text."""
    if isinstance(arguments, dict):
        return arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    return json.dumps(arguments)
