"""Tool use as plain text, for models whose chat template knows no tools (SmolLM2-Instruct, for instance).

Tools are described in the system message, calls and results are written between tags in ordinary text. The template
itself stays the tokenizer's own. Offers what `ChatRenderer` uses of a renderer of the `renderers` library.
"""

import json
import re
from typing import Any

from renderers import DefaultRenderer, ParsedResponse, ParsedToolCall, ToolCallParseStatus

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_INSTRUCTION = (
    "You can call tools. The tools are:\n<tools>\n{tools}\n</tools>\n"
    "To call one, write a JSON object between tags, and nothing after it:\n"
    '<tool_call>\n{{"name": "tool name", "arguments": {{"argument name": "value"}}}}\n</tool_call>'
)


class TextToolsRenderer:
    """Messages are those of the OpenAI chat format; ids are the tokenizer's."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._plain = DefaultRenderer(tokenizer)

    def render_ids(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        plain = _plain_messages(messages, tools or [])
        return list(self._plain.render_ids(plain, add_generation_prompt=add_generation_prompt))

    def parse_response(self, token_ids: list[int], **_: Any) -> ParsedResponse:
        stop = self.get_stop_token_ids()
        text = self._tokenizer.decode([i for i in token_ids if i not in stop], skip_special_tokens=False)
        calls = [_parse_call(match[1], closed=bool(match[2])) for match in _CALL.finditer(text)]
        return ParsedResponse(content=text.partition("<tool_call>")[0], tool_calls=calls)

    def get_stop_token_ids(self) -> list[int]:
        return list(self._plain.get_stop_token_ids())


def _plain_messages(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    plain: list[dict[str, Any]] = []
    if tools:
        specs = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        has_system = bool(messages) and messages[0]["role"] == "system"
        own = messages[0]["content"] + "\n\n" if has_system else ""
        plain.append({"role": "system", "content": own + _INSTRUCTION.format(tools=specs)})
        messages = messages[1:] if has_system else messages
    after_result = False
    for message in messages:
        role, text = message["role"], message["content"]
        if role == "tool":
            block = f"<tool_response>\n{text}\n</tool_response>"
            if after_result:
                plain[-1]["content"] += "\n" + block
            else:
                plain.append({"role": "user", "content": block})
        else:
            parts = [text] if text else []
            parts += [_call_text(call["function"]) for call in message.get("tool_calls", ())]
            plain.append({"role": role, "content": "\n".join(parts)})
        after_result = role == "tool"
    return plain


def _call_text(function: dict[str, Any]) -> str:
    payload = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(payload, ensure_ascii=False)}\n</tool_call>"


def _parse_call(body: str, *, closed: bool) -> ParsedToolCall:
    raw = f"<tool_call>{body}</tool_call>" if closed else f"<tool_call>{body}"
    if not closed:
        return ParsedToolCall(raw=raw, status=ToolCallParseStatus.UNCLOSED_BLOCK)
    try:
        payload = json.loads(body)
    except ValueError:
        return ParsedToolCall(raw=raw, status=ToolCallParseStatus.INVALID_JSON)
    name = payload.get("name") if isinstance(payload, dict) else None
    if not isinstance(name, str) or not name:
        return ParsedToolCall(raw=raw, status=ToolCallParseStatus.MISSING_NAME)
    return ParsedToolCall(raw=raw, name=name, arguments=payload.get("arguments", {}))
