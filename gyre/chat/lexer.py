"""Output ids to text and markers while they are being produced.

A marker is a special token, matched by its id and never by its spelling, or, where a family has no such token, a piece
of decoded text. What is yielded is stable: no half of a UTF-8 character and no part of a spelled marker; such a
beginning is held back until it is decided. How the ids were cut into chunks changes nothing but where text is cut, and
how many replacement characters stand for byte tokens (SentencePiece) that are not UTF-8.
"""

import enum
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

UNDECODED = "\N{REPLACEMENT CHARACTER}"
_CHARACTER = 4
"""Bytes of a character, so the most tokens that it may be spread over."""


class Mark(enum.Enum):
    THINK_OPEN = enum.auto()
    THINK_CLOSE = enum.auto()
    TOOL_OPEN = enum.auto()
    """The first token or text of a tool call, or of the section that holds them."""
    TAG = enum.auto()
    """A token inside the markup of calls; anywhere else it is text."""
    START = enum.auto()
    """Harmony: the header of a message begins (START), its channel is named (CHANNEL), its body begins (BODY) and ends
    (END)."""
    CHANNEL = enum.auto()
    BODY = enum.auto()
    END = enum.auto()


class Lexeme(NamedTuple):
    mark: Mark | None
    text: str
    """As the policy wrote it, for markers too."""


class Lexer:
    """Feed ids in any chunks, then `finish`. No spelled marker may begin another one."""

    def __init__(
        self, decode: Callable[[list[int]], str], tokens: Mapping[int, Mark], texts: Mapping[str, Mark]
    ) -> None:
        self._decode = decode
        self._tokens = tokens
        self._texts = texts
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._beginnings = {marker[:end] for marker in texts for end in range(1, len(marker))}
        self._longest = max(map(len, self._beginnings), default=0)
        self._context: list[int] = []
        """The tokens decoded before the pending ones. Some decoders write a token differently at the start of a text;
        SentencePiece's write a run of byte tokens as characters only where all of it is UTF-8."""
        self._pending: list[int] = []
        self._held = ""

    def feed(self, ids: Sequence[int]) -> list[Lexeme]:
        lexemes: list[Lexeme] = []
        for token in ids:
            mark = self._tokens.get(token)
            if mark is None:
                self._pending.append(token)
            else:
                lexemes += self._text(last=True)
                lexemes.append(Lexeme(mark, self._decode([token])))
        return lexemes + self._text(last=False)

    def finish(self) -> list[Lexeme]:
        """Everything that waited for more."""
        return self._text(last=True)

    def _text(self, *, last: bool) -> list[Lexeme]:
        text = self._held + self._decoded(last=last)
        lexemes: list[Lexeme] = []
        done = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            lexemes += [Lexeme(None, text[done : match.start()]), Lexeme(self._texts[match[0]], match[0])]
            done = match.end()
        end = len(text) if last else self._undecided(text, done)
        lexemes.append(Lexeme(None, text[done:end]))
        self._held = text[end:]
        return [lexeme for lexeme in lexemes if lexeme.text]

    def _decoded(self, *, last: bool) -> str:
        pending = self._pending
        if not pending:
            text = ""
        elif not last and len(pending) > _CHARACTER and self._decode(pending[-_CHARACTER:]).endswith(UNDECODED):
            # Halves of characters, repeated: decoded once when they end, not again at each one.
            return ""
        else:
            before = self._decode(self._context) if self._context else ""
            text = self._decode([*self._context, *pending])
            text = text[len(before) :] if text.startswith(before) else self._decode(pending)
            if text.endswith(UNDECODED) and not last:
                return ""
            self._context, self._pending = pending, []
        if last:
            self._context = []
        return text

    def _undecided(self, text: str, start: int) -> int:
        """Where the longest end of `text` begins that may become a spelled marker."""
        return next(
            (at for at in range(max(start, len(text) - self._longest), len(text)) if text[at:] in self._beginnings),
            len(text),
        )
