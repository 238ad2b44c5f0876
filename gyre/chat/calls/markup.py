"""How families write tool calls: data, and the text of calls with their special tokens told from spelled ones.

A tag that is a token of the tokenizer counts only as that token; the same characters in ordinary tokens are text. For
one regular expression to tell them apart, a token stands in the text as half of a surrogate pair: decoded text, being
Unicode, holds none. `TaggedText.written` turns it back.
"""

import re
from collections.abc import Iterable
from typing import Literal

import msgspec

from gyre.chat.lexer import Lexeme

_FIRST = 0xD800
_TOKEN = "\ud800-\udbff"


class TagMarkup(msgspec.Struct, frozen=True):
    """Values between tags: blocks of calls, calls of values. Fields are regular expressions; blanks may stand between
    all of them. Nothing is escaped in a value."""

    tags: tuple[str, ...]
    """What may be a token of the tokenizer."""
    block_open: str
    block_close: str
    call_open: str
    """Its group is the tool's name."""
    call_close: str
    """"" when the block's end is the call's."""
    value_open: str
    """Its group is the argument's name, a second one whether the value is text."""
    value_close: str
    own_lines: bool = False
    """A line break after the opening and one before the closing tag are part of the tags."""


class JsonMarkup(msgspec.Struct, frozen=True):
    """Arguments in JSON, which ends by itself."""

    tags: tuple[str, ...]
    """The first one begins a call, the last one ends it."""
    before: str
    """Groups "name" and "id", where they are not in the JSON."""
    after: str
    payload: Literal["call", "arguments"]
    """Whether the JSON holds name and arguments, or the arguments alone."""


_HERMES = ("<tool_call>", "</tool_call>")
_KIMI = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
_DEEPSEEK = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")

QWEN_TAGS = TagMarkup(
    _HERMES,
    block_open="<tool_call>",
    block_close="</tool_call>",
    call_open=r"<function=([^<>\n]+)>",
    call_close="</function>",
    value_open=r"<parameter=([^<>\n]+)>",
    value_close="</parameter>",
    own_lines=True,
)
GLM_TAGS = TagMarkup(
    (*_HERMES, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    block_open="<tool_call>",
    block_close="</tool_call>",
    call_open=rf"([^\s<{_TOKEN}]+)",
    call_close="",
    value_open=rf"<arg_key>\s*([^<\n{_TOKEN}]+?)\s*</arg_key>\s*<arg_value>",
    value_close="</arg_value>",
)
MINIMAX_TAGS = TagMarkup(
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    block_open="<minimax:tool_call>",
    block_close="</minimax:tool_call>",
    call_open=r'<invoke name="([^"<\n]+)">',
    call_close="</invoke>",
    value_open=r'<parameter name="([^"<\n]+)">',
    value_close="</parameter>",
)
_DSML = "(?:tool_calls|toolcalls|tool)>"
DSML_TAGS = TagMarkup(
    (),  # its token is only a part of each tag
    # A policy may leave out the tags around its calls.
    block_open=rf"(?:<｜DSML｜{_DSML}|(?=<｜DSML｜invoke\b))",
    block_close=rf"(?:</｜DSML｜{_DSML}|\Z)",
    call_open=r'<｜DSML｜invoke name="([^"<\n]+)">',
    call_close="</｜DSML｜invoke>",
    value_open=r'<｜DSML｜parameter name="([^"<\n]+)" string="(true|false)">',
    value_close="</｜DSML｜parameter>",
)
HERMES_JSON = JsonMarkup(_HERMES, before=r"<tool_call>\s*", after=r"\s*</tool_call>", payload="call")
KIMI_JSON = JsonMarkup(
    _KIMI,
    before=rf"{re.escape(_KIMI[0])}\s*(?P<id>(?:[^.:\s]*\.)?(?P<name>[^:\s{_TOKEN}]+)(?::[^\s{_TOKEN}]*)?)\s*"
    rf"{re.escape(_KIMI[1])}\s*",
    after=rf"\s*{re.escape(_KIMI[2])}",
    payload="arguments",
)
DEEPSEEK_JSON = JsonMarkup(
    _DEEPSEEK,
    before=rf"{_DEEPSEEK[0]}[^{_TOKEN}\n]*?{_DEEPSEEK[1]}\s*(?P<name>[^\s{_TOKEN}]+)\s*(?:```(?:json)?\s*)?",
    after=rf"\s*(?:```\s*)?{_DEEPSEEK[2]}",
    payload="arguments",
)


class TaggedText:
    """Text in which tag tokens stand for themselves alone."""

    def __init__(self, tags: Iterable[str], tokens: frozenset[str]) -> None:
        """`tokens`: which of the tags are tokens of the tokenizer."""
        self._marks = {tag: chr(_FIRST + i) for i, tag in enumerate(tags) if tag in tokens}
        self._spelling = {ord(mark): tag for tag, mark in self._marks.items()}

    def mark(self, lexemes: Iterable[Lexeme]) -> str:
        """What the policy wrote, its tag tokens as marks."""
        return "".join(
            lexeme.text if lexeme.mark is None else self._marks.get(lexeme.text, lexeme.text) for lexeme in lexemes
        )

    def written(self, text: str) -> str:
        """The text as the policy wrote it."""
        return text.translate(self._spelling)

    def pattern(self, expression: str) -> str:
        """An expression over tags as one over marked text."""
        for tag, mark in self._marks.items():
            expression = expression.replace(re.escape(tag), mark)
        return expression
