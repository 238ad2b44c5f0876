"""Tool use as plain text, for models whose chat template knows no tools (SmolLM2-Instruct, for instance).

Tools are described in the system message, calls and results are written between tags in ordinary text;
`markup.HERMES_JSON` says how they are read. The template itself stays the tokenizer's own. Offers what `ChatRenderer`
uses of a renderer of the `renderers` library.
"""

import json
from typing import Any

from renderers import DefaultRenderer

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
