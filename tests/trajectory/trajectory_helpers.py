"""A tiny tokenizer, and a scripted policy that answers calls of a tree with any text, tokenised as it likes."""

import itertools
import json
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gyre.chat.conversation import Conversation, Message, Tool, ToolCall
from gyre.core.records import CallRecord, RoleClass
from gyre.trajectory.call import Sample
from gyre.trajectory.tree import TrajectoryTree

QWEN_SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_GLM = (
    "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>",
)  # fmt: skip
_KIMI = (
    "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "[EOS]", "[BOS]",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>", "<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>",
)  # fmt: skip
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
)  # fmt: skip
FAMILY_SPECIALS = {
    "qwen3": (),
    "qwen35": _QWEN_VISION,
    "qwen36": _QWEN_VISION,
    "qwen38": _QWEN_VISION,
    "llama3": (
        "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
        "<|python_tag|>",
    ),
    "glm45": _GLM,
    "glm5": _GLM,
    "glm51": _GLM,
    "glm53": _GLM,
    "kimi_k2": _KIMI,
    "kimi_k25": _KIMI,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_r1": _DEEPSEEK,
    "deepseek_v4": (
        "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>",
        "｜DSML｜", "<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>",
    ),
    "gpt_oss": (
        "<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>", "<|constrain|>",
    ),
    "minimax_m2": ("]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>"),
    "nemotron3": (),
    "default": (),
    "text_tools": (),
}  # fmt: skip
"""Every family that a configuration may name, with the special tokens of its tokenizers beyond those of Qwen3."""
BASH = Tool("Bash", "Runs a command.", {"type": "object", "properties": {"command": {"type": "string"}}})
EDIT = Tool("Edit", "Edits a file.", {"type": "object", "properties": {"file_path": {"type": "string"}}})
TOOLS = (BASH, EDIT)

_CORPUS = [
    'system user assistant tool You are a helpful agent. {"name": "Bash", "arguments": {"command": "ls -la"}}',
    "the list of files in the directory is here and there, hello world, yes and no, 0 1 2 3 4 5 6 7 8 9",
    "# Tools You may call one or more functions to assist with the user query. function signatures within XML tags",
]


@cache
def make_tokenizer(specials: tuple[str, ...] = (), chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Byte-level BPE with about 200 merges; every text round-trips."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[*QWEN_SPECIALS, *specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_CORPUS * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=chat_template
    )


def system(text: str) -> Message:
    return Message(role="system", text=text)


def user(text: str) -> Message:
    return Message(role="user", text=text)


def result(call: ToolCall | str, text: str) -> Message:
    return Message(role="tool", text=text, tool_call_id=call if isinstance(call, str) else call.id)


def answer_text(text: str = "", calls: tuple[tuple[str, dict], ...] = (), reasoning: str = "") -> str:
    """What a Qwen3 policy would sample, without the end token."""
    parts = [f"<think>\n{reasoning}\n</think>\n\n"] if reasoning else []
    parts.append(text)
    for index, (name, arguments) in enumerate(calls):
        parts.append("\n" if index or text else "")
        parts.append(f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>')
    return "".join(parts)


def split_ids(tokenizer, text: str, salt: int = 0) -> list[int]:
    """A non-canonical tokenisation: the text is cut at odd places, each piece encoded alone."""
    ids: list[int] = []
    start = 0
    while start < len(text):
        special = next((s for s in QWEN_SPECIALS if text.startswith(s, start)), "")
        width = len(special) or 1 + (start + salt) % 2
        piece = text[start : start + width]
        if not special and "<" in piece[1:]:
            piece = piece[: piece.index("<", 1)]
        ids += tokenizer.encode(piece, add_special_tokens=False)
        start += len(piece)
    return ids


class Policy:
    """Answers prepared calls; ids, log-probs and versions are distinct so that mix-ups show."""

    def __init__(self, tree: TrajectoryTree, renderer, tokenizer) -> None:
        self.tree, self.renderer, self.tokenizer = tree, renderer, tokenizer
        self._ids = itertools.count()
        self._logprobs = itertools.count(1)
        self.prompts: dict[str, list[int]] = {}

    def ask(
        self,
        conversation: Conversation,
        text: str,
        *,
        canonical: bool = True,
        role: RoleClass = RoleClass.MAIN,
        agent_id: str = "",
        finish: str = "stop",
        stop: str = "<|im_end|>",
        trainable: bool = True,
    ) -> tuple[CallRecord, Message]:
        prepared = self.tree.prepare(conversation, role=role, agent_id=agent_id)
        ids = self.tokenizer.encode(text, add_special_tokens=False) if canonical else split_ids(self.tokenizer, text)
        if finish == "stop":
            ids = [*ids, self.tokenizer.convert_tokens_to_ids(stop)]
        turn = self.renderer.parse(ids, conversation.tools)
        number = next(self._ids)
        emitted = Message(
            role="assistant",
            text=turn.text,
            reasoning=turn.reasoning,
            tool_calls=tuple(
                ToolCall(f"call_{number}_{i}", call.name, call.arguments) for i, call in enumerate(turn.good_calls)
            ),
        )
        sample = Sample(
            output_ids=ids,
            logprobs=[-next(self._logprobs) / 1e4 for _ in ids],
            versions=[number] * len(ids),
            finish=finish,
            cells=[0],
        )
        call_id = f"c{number}"
        record = self.tree.commit(prepared, sample, emitted, call_id=call_id, trainable=trainable, flags=turn.flags)
        self.prompts[call_id] = prepared.input_ids
        return record, emitted
