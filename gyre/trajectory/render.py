"""Messages to tokens and back, for one model family (DESIGN §5, notes on token fidelity).

`ChatRenderer` wraps the `renderers` library, which knows the chat templates as code. It never loads anything: the
tokenizer is passed in. A bridge renders only what is new after a stored path, so tokens that the policy sampled are
never encoded a second time.
"""

from collections.abc import Sequence
from typing import Any

import renderers

from gyre.core.errors import GyreError
from gyre.trajectory.conversation import Conversation, Message, Tool
from gyre.trajectory.stream_parse import Grammar, ParsedCall, ParsedTurn, StreamingParse, call_arguments
from gyre.trajectory.text_tools import TextToolsRenderer

BRIDGE_TAIL = 4096
"""A bridge reads the end of the previous prompt only to see which channel it left open; this much holds any header."""

_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    # family: (name in `renderers`, its thinking switch or "", settings that keep reasoning in the history)
    "qwen3": ("qwen3", "enable_thinking", {"thinking_retention": "all"}),
    "qwen35": ("qwen3.5", "enable_thinking", {"thinking_retention": "all"}),
    "qwen36": ("qwen3.6", "enable_thinking", {"preserve_thinking": True}),
    "qwen38": ("qwen3.8", "enable_thinking", {"preserve_thinking": True}),
    "llama3": ("llama-3", "", {}),
    "glm45": ("glm-4.5", "enable_thinking", {"thinking_retention": "all"}),
    "glm5": ("glm-5", "enable_thinking", {"clear_thinking": False}),
    "glm51": ("glm-5.1", "enable_thinking", {"clear_thinking": False}),
    "glm53": ("glm-5.3", "", {"clear_thinking": False}),
    "kimi_k2": ("kimi-k2", "enable_thinking", {"thinking_retention": "all"}),
    "kimi_k25": ("kimi-k2.5", "thinking", {"thinking_retention": "all"}),
    "deepseek_v3": ("deepseek-v3", "", {"thinking_retention": "all"}),
    "deepseek_r1": ("deepseek-r1", "", {"thinking_retention": "all"}),
    "deepseek_v4": ("deepseek-v4", "enable_thinking", {"drop_thinking": False}),
    "gpt_oss": ("gpt-oss", "", {"auto_drop_analysis": False, "conversation_start_date": "2026-01-01"}),
    "minimax_m2": ("minimax-m2", "", {"thinking_retention": "all"}),
    "nemotron3": ("nemotron-3", "enable_thinking", {"truncate_history_thinking": False}),
    "default": ("default", "", {}),
    "text_tools": ("default", "", {}),
}

FAMILIES: tuple[str, ...] = tuple(sorted(_FAMILIES))
"""Model families that a configuration may name. "default" applies the tokenizer's own chat template and reads no tool
calls; "text_tools" does so too, and describes and reads tool calls as plain text."""

_MARKERS: dict[str, tuple[str, str]] = {
    # family prefix: (token that opens the tool-call part, token that closes one call)
    "qwen3": ("<tool_call>", "</tool_call>"),
    "glm": ("<tool_call>", "</tool_call>"),
    "kimi": ("<|tool_calls_section_begin|>", "<|tool_call_end|>"),
    "minimax": ("<minimax:tool_call>", "</minimax:tool_call>"),
}


class RenderError(GyreError):
    """The chat template could not render a conversation; the call fails before its first byte (DESIGN §5)."""


class ChatRenderer:
    """Renders and parses for one tokenizer and family. Pure: equal inputs give equal tokens; no state between calls."""

    def __init__(self, tokenizer: Any, family: str, *, thinking: bool) -> None:
        """`tokenizer` is a Hugging Face fast tokenizer or alike. `thinking` selects the template's thinking mode where
        the family has one. Raises RenderError for an unknown family or a tokenizer without the family's tokens."""
        if family not in _FAMILIES:
            raise RenderError(f"Unknown model family {family!r}: use one of {', '.join(FAMILIES)}.")
        name, switch, settings = _FAMILIES[family]
        self.family = family
        self.thinking = thinking
        self._tokenizer = tokenizer
        self._generic = family in ("default", "text_tools")
        try:
            config_type = type(renderers.config_from_name(name))
            config = config_type(**({switch: thinking} if switch else {}), **settings)
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
        self._grammar = self._make_grammar()

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
        new = self._wire(conversation.messages, start)
        if self._generic or not new or any(message["role"] == "assistant" for message in new):
            return self._bridge_by_template(output_ids, conversation, start)
        prompt, output = list(prompt_ids[-BRIDGE_TAIL:]), list(output_ids)
        try:
            bridged = self._renderer.bridge_to_next_turn(prompt, output, new, tools=_wire_tools(conversation.tools))
        except Exception as error:
            raise RenderError(f"The {self.family} template failed on new messages: {error}") from error
        path = prompt + output
        if bridged is None or bridged.token_ids[: len(path)] != path:
            return self._bridge_by_template(output_ids, conversation, start)
        return list(bridged.token_ids[len(path) :])

    def parse(self, output_ids: Sequence[int], tools: Sequence[Tool] = ()) -> ParsedTurn:
        """Reads one sampled turn; equal to what `stream` yields in pieces. Malformed calls are reported, not raised."""
        stream = self.stream(tools)
        stream.feed(output_ids)
        stream.finish()
        return stream.turn

    def stream(self, tools: Sequence[Tool] = ()) -> StreamingParse:
        """A parser that is fed with output ids as they are produced."""
        return StreamingParse(self._grammar, lambda ids: self._parse_whole(ids, tools))

    def _wire(self, messages: Sequence[Message], start: int) -> list[dict[str, Any]]:
        wire = _wire_messages(messages, start)
        if self._late_system:
            return wire
        return [
            {**message, "role": "user"} if message["role"] == "system" and start + offset > 0 else message
            for offset, message in enumerate(wire)
        ]

    def _accepts_late_system(self) -> bool:
        """Claude Code sends role system inside the history; templates that refuse it get these as user messages."""
        try:
            self._renderer.render_ids([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}])
        except Exception as error:
            if "system" in str(error).lower():
                return False
            raise
        return True

    def _call(self, messages: list[dict[str, Any]], tools: Sequence[Tool], *, generation_prompt: bool) -> list[int]:
        try:
            ids = self._renderer.render_ids(messages, tools=_wire_tools(tools), add_generation_prompt=generation_prompt)
        except Exception as error:
            raise RenderError(
                f"The {self.family} chat template failed on a conversation of {len(messages)} messages: {error}"
            ) from error
        return list(ids)

    def _bridge_by_template(
        self, output_ids: Sequence[int], conversation: Conversation, start: int
    ) -> list[int] | None:
        """Continuation through a stand-in history: one user turn, one assistant turn, then the new messages.

        What follows the end token of the stand-in assistant turn is what follows it on the stored path. Used for
        templates without a bridge of their own and for assistant turns that the policy did not sample here."""
        user: dict[str, Any] = {"role": "user", "content": "a"}
        last: dict[str, Any] = {"role": "assistant", "content": "b"}
        if 0 < start <= len(conversation.messages) and conversation.messages[start - 1].role == "assistant":
            last = self._wire(conversation.messages[:start], start - 1)[0]
        before = self._count_stops(self._call([user], (), generation_prompt=False))
        if self._count_stops(self._call([user, last], (), generation_prompt=False)) != before + 1:
            return None
        full = self._call([user, last, *self._wire(conversation.messages, start)], (), generation_prompt=True)
        stops = [position for position, token in enumerate(full) if token in self._stop]
        end = stops[before]
        closed = bool(output_ids) and output_ids[-1] in self._stop
        return full[end + 1 :] if closed else full[end:]

    def _count_stops(self, ids: list[int]) -> int:
        return sum(token in self._stop for token in ids)

    def _parse_whole(self, ids: list[int], tools: Sequence[Tool]) -> ParsedTurn:
        parsed = self._renderer.parse_response(ids, tools=_wire_tools(tools), prompt_ids=self._opening)
        calls = []
        for call in parsed.tool_calls:
            arguments = call_arguments(call.arguments)
            status = str(call.status)
            ok = status in ("ok", "unknown_tool") and bool(call.name) and isinstance(arguments, dict)
            calls.append(ParsedCall(name=call.name or "", arguments=arguments if ok else call.raw, raw=call.raw, ok=ok))
        text = parsed.content.strip()
        if calls and not any(call.ok for call in calls):
            text = "\n".join(part for part in (text, *(call.raw.strip() for call in calls)) if part)
        return ParsedTurn(text=text, reasoning=(parsed.reasoning_content or "").strip(), calls=tuple(calls))

    def _make_grammar(self) -> Grammar:
        family = next((prefix for prefix in _MARKERS if self.family.startswith(prefix)), None)
        think_open, think_close = self._single("<think>"), self._single("</think>")
        opener, closer = _MARKERS[family] if family else ("", "")
        tool_open, tool_close = self._single(opener), self._single(closer)
        atomic = None not in (think_open, think_close, tool_open, tool_close)
        return Grammar(
            decode=self._decode,
            stop=frozenset(self._stop),
            think_open=think_open if atomic else None,
            think_close=think_close if atomic else None,
            tool_open=tool_open if atomic else None,
            tool_close=tool_close if atomic else None,
            starts_in_reasoning=self._opens_reasoning(),
        )

    def _opens_reasoning(self) -> bool:
        opener, closer = self._single("<think>"), self._single("</think>")
        last = next((token for token in reversed(self._opening) if token in (opener, closer)), None)
        return last is not None and last == opener

    def _single(self, token: str) -> int | None:
        token_id = self._tokenizer.convert_tokens_to_ids(token) if token else None
        return token_id if isinstance(token_id, int) and token_id != self._tokenizer.unk_token_id else None

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False)) if ids else ""


def _wire_messages(messages: Sequence[Message], start: int) -> list[dict[str, Any]]:
    """`messages[start:]` in the form that templates read. Tool messages carry the name of the tool that they answer."""
    first = start
    while first > 0 and messages[first - 1].role != "assistant":
        first -= 1
    names: dict[str, str] = {}
    wire = []
    for index in range(max(first - 1, 0), len(messages)):
        message = messages[index]
        names.update((call.id, call.name) for call in message.tool_calls)
        if index >= start:
            wire.append(_wire_message(message, names))
    return wire


def _wire_message(message: Message, names: dict[str, str]) -> dict[str, Any]:
    wire: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning:
        wire["reasoning_content"] = message.reasoning
    if message.tool_calls:
        wire["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": _mapping(call.arguments)}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        wire["tool_call_id"] = message.tool_call_id
        wire["name"] = names.get(message.tool_call_id, "tool")
    return wire


def _mapping(arguments: dict[str, Any] | str) -> dict[str, Any]:
    parsed = call_arguments(arguments)
    return parsed if isinstance(parsed, dict) else {"raw": arguments}


def _wire_tools(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
        }
        for tool in tools
    ]
