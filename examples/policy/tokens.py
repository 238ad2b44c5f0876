"""The tiny policy's vocabulary, and conversations as the tokens that serving will see.

Byte-level BPE with Qwen3's special tokens. Words are split as Qwen3 does, except that a run of punctuation may span
single spaces, so that the JSON of tool declarations and calls takes few tokens.
"""

import json
from collections.abc import Iterable, Iterator

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gyre.chat.conversation import Conversation, Message
from gyre.chat.render import ChatRenderer

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+(?: [^\s\p{L}\p{N}]+)*[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = r"""{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments ' }}
{{- 'within <tool_call></tool_call> XML tags:\n<tool_call>\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\n' }}{%- endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- elif message.role == 'user' or not loop.first %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{%- endif %}"""
"""The layout of Qwen3 with thinking off, for tools that read a template; Gyre itself renders with `ChatRenderer`."""


def trained_tokenizer(conversations: Iterable[Conversation], size: int) -> PreTrainedTokenizerFast:
    """Learns at most `size` tokens, fewer when the words of the conversations need fewer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=[], show_progress=False)
    tokenizer.train_from_iterator(_texts(conversations), trainer)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


def _texts(conversations: Iterable[Conversation]) -> Iterator[str]:
    for conversation in conversations:
        for tool in conversation.tools:
            yield json.dumps({"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}})
            yield tool.description
        for message in conversation.messages:
            yield f"{message.role}\n{message.text}\n"
            yield _written(message)
    yield TEMPLATE


def _written(message: Message) -> str:
    """An assistant turn as the policy samples it, without the end token."""
    calls = []
    for call in message.tool_calls:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        calls.append(f'<tool_call>\n{{"name": "{call.name}", "arguments": {arguments}}}\n</tool_call>')
    return "\n".join([message.text] * bool(message.text) + calls)


def tokens(
    conversation: Conversation, renderer: ChatRenderer, tokenizer: PreTrainedTokenizerFast
) -> tuple[list[int], list[bool]]:
    """A finished conversation as ids, and which of them the policy samples, both [T]: prompt, turn, bridge, turn, …"""
    ids: list[int] = []
    sampled: list[bool] = []
    output: list[int] = []
    start = 0
    for index, message in enumerate(conversation.messages):
        if message.role != "assistant":
            continue
        sofar = Conversation(conversation.messages[:index], conversation.tools)
        added = renderer.bridge(ids[: len(ids) - len(output)], output, sofar, start) if ids else renderer.render(sofar)
        if added is None:
            raise ValueError("The template cannot continue this conversation.")
        output = tokenizer.encode(_written(message) + "<|im_end|>", add_special_tokens=False)
        ids += added + output
        sampled += [False] * len(added) + [True] * len(output)
        start = index + 1
    return ids, sampled
