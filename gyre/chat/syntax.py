"""What a sampled turn consists of: reasoning, text, tool calls. One small state machine per way of writing a turn.

A syntax takes lexemes and says what each adds to the reasoning and to the text. From where a tool call may begin it
yields nothing and keeps the rest as `tail`: whether that is a call is known only when it parses, and what was shown
cannot be taken back.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gyre.chat.lexer import Lexeme, Mark


class Shown(NamedTuple):
    """What a lexeme adds, not stripped."""

    reasoning: str = ""
    text: str = ""


class Syntax(Protocol):
    def take(self, lexeme: Lexeme) -> Shown: ...

    def finish(self) -> Shown:
        """What was held back for something that did not come. Called once, after the last lexeme."""
        ...

    @property
    def tail(self) -> Sequence[Lexeme]:
        """What the policy wrote from the first tool call on; empty when the turn has none. Read after `finish`."""
        ...

    @property
    def attempted(self) -> bool:
        """Whether a tail that does not parse counts as an attempt at a call."""
        ...


class TagSyntax:
    """`<think>`reasoning`</think>` text, then calls behind a marker or, with `json_calls` (Llama 3), a turn that is one
    JSON object.

    Reasoning is at the start only; think markers after it are text. A tool marker inside reasoning ends it unless an
    end of reasoning still follows."""

    def __init__(self, *, starts_in_reasoning: bool, json_calls: bool = False) -> None:
        self._state = "reasoning" if starts_in_reasoning else "start"
        self._json_calls = json_calls
        self._before = ""
        self._tail: list[Lexeme] = []

    def take(self, lexeme: Lexeme) -> Shown:
        mark, text = lexeme
        if self._state in ("calls", "reasoning or calls"):
            self._tail.append(lexeme)
            if self._state == "calls" or mark is not Mark.THINK_CLOSE:
                return Shown()
            reasoning = "".join(held.text for held in self._tail[:-1] if held.mark is not Mark.THINK_OPEN)
            self._state, self._tail = "content", []
            return Shown(reasoning=reasoning)
        if mark is Mark.TOOL_OPEN:
            self._state = "reasoning or calls" if self._state == "reasoning" else "calls"
            self._tail = [lexeme]
            return Shown()
        if self._state == "reasoning":
            if mark is Mark.THINK_CLOSE:
                self._state = "content"
            return Shown(reasoning=text if mark in (None, Mark.TAG) else "")
        if self._state == "start":
            return self._start(mark, text)
        return Shown(text=text)

    def finish(self) -> Shown:
        return Shown(text=self._before)

    @property
    def tail(self) -> Sequence[Lexeme]:
        return self._tail

    @property
    def attempted(self) -> bool:
        return not self._json_calls or '"name"' in "".join(lexeme.text for lexeme in self._tail)

    def _start(self, mark: Mark | None, text: str) -> Shown:
        if mark is Mark.THINK_OPEN:
            self._state, self._before = "reasoning", ""
            return Shown()
        text, self._before = self._before + text, ""
        if not text.strip() or (self._json_calls and re.fullmatch(r"\s*\{\s*", text)):
            self._before = text
        elif self._json_calls and re.match(r'\s*\{\s*["}]', text):
            self._state, self._tail = "calls", [Lexeme(None, text)]
        else:
            self._state = "content"
            return Shown(text=text)
        return Shown()


class HarmonySyntax:
    """gpt-oss: messages of header and body; the header names a channel and, for a call, its recipient. The prompt has
    opened the first message, which is analysis. Text between messages belongs to none and is not shown."""

    attempted = True

    def __init__(self) -> None:
        self._state = "reasoning"
        self._header = ""
        self._tail = ""

    def take(self, lexeme: Lexeme) -> Shown:
        mark, text = lexeme
        if self._state == "calls":
            self._tail += text
        elif mark is Mark.START:
            self._state, self._header = "header", text
        elif self._state == "header":
            self._header += text
            if mark is Mark.BODY:
                self._open_body()
        elif mark is Mark.END:
            self._state = "between"
        elif self._state == "reasoning":
            return Shown(reasoning=text)
        elif self._state == "text":
            return Shown(text=text)
        return Shown()

    def finish(self) -> Shown:
        if self._state == "header" and "to=" in self._header:
            self._tail = self._header
        return Shown()

    @property
    def tail(self) -> Sequence[Lexeme]:
        return [Lexeme(None, self._tail)] if self._tail else []

    def _open_body(self) -> None:
        if re.search(r"to=functions\.", self._header):
            self._state, self._tail = "calls", self._header
        else:
            self._state = "reasoning" if re.search(r"<\|channel\|>\s*analysis\b", self._header) else "text"
