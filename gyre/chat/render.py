"""Messages to tokens and back, for one model family (docs/exactness.md).

`ChatRenderer` wraps the `renderers` library, which knows the chat templates as code. It never loads anything: the
tokenizer is passed in. A bridge renders only what is new after a stored path, so tokens that the policy sampled are
never encoded a second time.
"""

from collections.abc import Sequence
from typing import Any

import renderers

from gyre.chat.calls.json_calls import JsonReader
from gyre.chat.calls.markup import TagMarkup
from gyre.chat.calls.parsed_call import ParsedCall, call_arguments, can_be_sent
from gyre.chat.calls.tag_calls import TagReader
from gyre.chat.conversation import Conversation, Message, Tool
from gyre.chat.families import FAMILIES
from gyre.chat.lexer import Lexeme, Lexer, Mark
from gyre.chat.stream_parse import ParsedTurn, StreamingParse
from gyre.chat.syntax import HarmonySyntax, Syntax, TagSyntax
from gyre.chat.text_tools import TextToolsRenderer
from gyre.chat.wire import kimi_ids, one_call_each, wire_messages, wire_tools, with_ids
from gyre.core.errors import GyreError

BRIDGE_TAIL = 4096
"""A bridge reads the end of the previous prompt only to see which channel it left open; this much holds any header."""

_THINK = {"<think>": Mark.THINK_OPEN, "</think>": Mark.THINK_CLOSE}
_HARMONY = {"<|start|>": Mark.START, "<|channel|>": Mark.CHANNEL, "<|message|>": Mark.BODY, "<|end|>": Mark.END}


class RenderError(GyreError):
    """The chat template could not render a conversation; the call fails before its first byte (docs/exactness.md)."""


class ChatRenderer:
    """Renders and parses for one tokenizer and family. Pure: equal inputs give equal tokens; no state between calls."""

    def __init__(self, tokenizer: Any, family: str, *, thinking: bool) -> None:
        """`tokenizer` is a Hugging Face fast tokenizer or alike. `thinking` selects the template's thinking mode where
        the family has one. Raises RenderError for an unknown family or a tokenizer without the family's tokens."""
        if family not in FAMILIES:
            raise RenderError(f"Unknown model family {family!r}: use one of {', '.join(sorted(FAMILIES))}.")
        self.family = family
        self.thinking = thinking
        self._facts = facts = FAMILIES[family]
        self._tokenizer = tokenizer
        self._generic = family in ("default", "text_tools")
        try:
            switch = {facts.thinking_switch: thinking} if facts.thinking_switch else {}
            config = type(renderers.config_from_name(facts.template))(**switch, **facts.settings)
            self._renderer: Any = (
                TextToolsRenderer(tokenizer) if family == "text_tools" else renderers.create_renderer(tokenizer, config)
            )
            self._stop: list[int] = sorted(set(self._renderer.get_stop_token_ids()))
            self._opening: list[int] = self._renderer.render_ids(
                [{"role": "user", "content": "a"}], add_generation_prompt=True
            )
            self._late_system = self._accepts_late_system()
        except Exception as error:
            raise RenderError(f"The tokenizer does not fit model family {family!r}: {error}") from error
        self._marks = self._find_marks()
        self._reader = self._call_reader()

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens at which an engine must stop; sampled ones are part of the output."""
        return list(self._stop)

    def render(self, conversation: Conversation) -> list[int]:
        """The whole prompt including the generation prompt, [T]. Raises RenderError."""
        messages = self._wire(conversation.messages, 0)
        return self._call(messages, conversation.tools, generation_prompt=True)

    def bridge(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], conversation: Conversation, start: int
    ) -> list[int] | None:
        """Only the ids that follow `prompt_ids + output_ids` when `conversation.messages[start:]` is new.

        The result begins with what the template puts after the turn that ended there (its end token too, when the
        sample was cut before it) and ends with the generation prompt. None when the template cannot continue that
        path; the caller then renders whole. Of `prompt_ids` only the end is read. Raises RenderError."""
        new = self._wire(conversation.messages, start, self._written_ids(output_ids, conversation, start))
        if self._generic or not new or any(message["role"] == "assistant" for message in new):
            return self._bridge_by_template(output_ids, conversation, start, new)
        prompt, output = list(prompt_ids[-BRIDGE_TAIL:]), list(output_ids)
        # gpt-oss: the library closes a message that was cut, and would close one that was cut at its end again.
        closed = bool(output) and self._marks[0].get(output[-1]) is Mark.END
        sampled = output[:-1] if closed else output
        try:
            bridged = self._renderer.bridge_to_next_turn(prompt, sampled, new, tools=wire_tools(conversation.tools))
        except Exception as error:
            raise RenderError(f"The {self.family} template failed on new messages: {error}") from error
        path = prompt + output
        if bridged is None or bridged.token_ids[: len(path)] != path:
            return self._bridge_by_template(output_ids, conversation, start, new)
        return list(bridged.token_ids[len(path) :])

    def parse(self, output_ids: Sequence[int], tools: Sequence[Tool] = ()) -> ParsedTurn:
        """Reads one sampled turn; equal to what `stream` yields in pieces. Malformed calls are reported, not raised."""
        stream = self.stream(tools)
        stream.feed(output_ids)
        stream.finish()
        return stream.turn

    def stream(self, tools: Sequence[Tool] = ()) -> StreamingParse:
        """A parser that is fed with output ids as they are produced."""
        syntax: Syntax
        if self._facts.syntax == "harmony":
            syntax = HarmonySyntax()
        else:
            syntax = TagSyntax(starts_in_reasoning=self._opens_reasoning, json_calls=self._facts.syntax == "json")
        lexer = Lexer(self._decode, *self._marks)
        return StreamingParse(
            lexer, syntax, frozenset(self._stop), lambda ids, tail: self._read_calls(ids, tail, tools)
        )

    def _written_ids(self, output_ids: Sequence[int], conversation: Conversation, start: int) -> dict[str, str]:
        """Issued id → the one that the policy wrote, of the calls that `output_ids` made: those of the message before
        `start`. None where it writes no ids, or when that message has other calls."""
        if not self._facts.own_call_ids or not start:
            return {}
        written = [call.id for call in self.parse(output_ids, conversation.tools).good_calls]
        issued = [call.id for call in conversation.messages[start - 1].tool_calls]
        return dict(zip(issued, written, strict=True)) if len(issued) == len(written) else {}

    def _wire(
        self, messages: Sequence[Message], start: int, written: dict[str, str] | None = None
    ) -> list[dict[str, Any]]:
        wire = wire_messages(messages, start)
        if self._facts.own_call_ids:
            ids = kimi_ids(messages) | (written or {})
            wire = [with_ids(message, ids) for message in wire]
        if not self._late_system:
            wire = [
                {**message, "role": "user"} if message["role"] == "system" and start + offset > 0 else message
                for offset, message in enumerate(wire)
            ]
        return [part for message in wire for part in one_call_each(message)] if self._facts.single_call else wire

    def _accepts_late_system(self) -> bool:
        """Claude Code sends role system inside the history, Codex two at the start; templates that refuse it, leave it
        out or move it, after a system prompt or without one, get these as user messages."""
        sequences = (("system", "user", "system"), ("user", "system"))
        return all(self._stays_in_place(roles) for roles in sequences) and self._writes_two_system_prompts()

    def _writes_two_system_prompts(self) -> bool:
        """Llama 3 puts the tools into the message after the system prompt, which must be the user's."""
        messages = [{"role": role, "content": role} for role in ("system", "system", "user")]
        try:
            self._call(messages, (Tool("t", "", {}),), generation_prompt=True)
        except RenderError:
            return False
        return True

    def _stays_in_place(self, roles: Sequence[str]) -> bool:
        """Whether the last of these messages is written after the others."""
        messages = [{"role": role, "content": role} for role in roles]
        before = self._renderer.render_ids(messages[:-1])
        try:
            after = self._renderer.render_ids(messages)
        except Exception as error:
            if "system" in str(error).lower() or "role" in str(error).lower():
                return False
            raise
        return len(after) > len(before) and after[: len(before)] == before

    def _call(self, messages: list[dict[str, Any]], tools: Sequence[Tool], *, generation_prompt: bool) -> list[int]:
        try:
            ids = self._renderer.render_ids(messages, tools=wire_tools(tools), add_generation_prompt=generation_prompt)
        except Exception as error:
            raise RenderError(
                f"The {self.family} chat template failed on a conversation of {len(messages)} messages: {error}"
            ) from error
        return list(ids)

    def _bridge_by_template(
        self, output_ids: Sequence[int], conversation: Conversation, start: int, new: list[dict[str, Any]]
    ) -> list[int] | None:
        """Continuation through a stand-in history: one user turn, one assistant turn, then the new messages.

        What follows the end token of the stand-in assistant turn is what follows it on the stored path. Used for
        templates without a bridge of their own and for assistant turns that the policy did not sample here."""
        user: dict[str, Any] = {"role": "user", "content": "a"}
        last: dict[str, Any] = {"role": "assistant", "content": "b"}
        if 0 < start <= len(conversation.messages) and conversation.messages[start - 1].role == "assistant":
            last = self._wire(conversation.messages[:start], start - 1)[0]
        before = len(self._stops(self._call([user], (), generation_prompt=False)))
        alone = self._call([user, last], (), generation_prompt=False)
        full = self._call([user, last, *new], (), generation_prompt=True)
        own_end = self._stops(alone)[before:]
        if len(own_end) > 1:  # the turn spells an end token: which is its end cannot be told
            return None
        end = own_end[0] if own_end else len(alone)
        if full[:end] != alone[:end]:  # the template writes a turn otherwise when something follows it
            if not own_end and conversation.messages[start].role not in ("user", "tool"):
                return None
            end = self._stops(full)[before]
        # Without an end token of its own, a turn is ended by the first token of the next message (GLM).
        ending = [*full[end : end + 1], *(self._stop if own_end else ())]
        closed = bool(output_ids) and output_ids[-1] in ending
        return full[end + 1 :] if closed else full[end:]

    def _stops(self, ids: list[int]) -> list[int]:
        return [position for position, token in enumerate(ids) if token in self._stop]

    def _read_calls(self, ids: list[int], tail: Sequence[Lexeme], tools: Sequence[Tool]) -> tuple[ParsedCall, ...]:
        if isinstance(self._reader, TagReader):
            return self._reader.read(tail, tools)
        if isinstance(self._reader, JsonReader):
            return self._reader.read(tail)
        return self._read_calls_by_library(ids)

    def _read_calls_by_library(self, ids: list[int]) -> tuple[ParsedCall, ...]:
        try:
            parsed = self._renderer.parse_response(ids, prompt_ids=self._opening)
        except (ValueError, RecursionError):
            # A policy that repeats itself writes numbers of thousands of digits and brackets without end.
            return ()
        calls = []
        for call in parsed.tool_calls:
            arguments = call_arguments(call.arguments)
            name = call.name if isinstance(call.name, str) else ""  # Llama's JSON may name a call anything
            ok = str(call.status) == "ok" and bool(name) and can_be_sent(name, arguments)
            calls.append(ParsedCall(name=name, arguments=arguments if ok else call.raw, raw=call.raw, ok=ok))
        return tuple(calls)

    def _call_reader(self) -> TagReader | JsonReader | None:
        markup = self._facts.markup
        if markup is None:
            return None
        tokens = frozenset(tag for tag in markup.tags if self._single(tag) is not None)
        return TagReader(markup, tokens) if isinstance(markup, TagMarkup) else JsonReader(markup, tokens)

    def _find_marks(self) -> tuple[dict[int, Mark], dict[str, Mark]]:
        """The family's markers that are tokens of this tokenizer, and those that are text."""
        facts = self._facts
        marks = dict(_HARMONY if facts.syntax == "harmony" else _THINK if facts.thinks else {})
        marks.update(dict.fromkeys(facts.tool_openers, Mark.TOOL_OPEN))
        tags = dict.fromkeys(facts.markup.tags if facts.markup else (), Mark.TAG) | marks
        tokens = {marker: self._single(marker) for marker in tags}
        return (
            {token: tags[marker] for marker, token in tokens.items() if token is not None},
            {marker: mark for marker, mark in marks.items() if tokens[marker] is None},
        )

    @property
    def _opens_reasoning(self) -> bool:
        opening = self._decode(self._opening)
        return self._facts.thinks and opening.rfind("<think>") > opening.rfind("</think>")

    def _single(self, token: str) -> int | None:
        token_id = self._tokenizer.convert_tokens_to_ids(token)
        return token_id if isinstance(token_id, int) and token_id != self._tokenizer.unk_token_id else None

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)
