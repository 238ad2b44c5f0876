"""Model families under test: tokenizers, and what a policy of a family samples for one turn."""

import os
from functools import cache
from pathlib import Path

import pytest
from trajectory_helpers import CHATML, FAMILY_SPECIALS, make_tokenizer

from gyre.chat.families import FAMILIES
from gyre.chat.render import ChatRenderer

REAL = Path(__file__).parents[2] / ".cache" / "tokenizers"
"""Where `scripts/tokenizers.sh` puts real tokenizers."""

ONLY_REAL = ("gpt_oss",)
"""Its template code encodes with the vocabulary of the model itself."""
SYNTHETIC = sorted(set(FAMILIES) - set(ONLY_REAL))
KINDS = [
    *((family, "synthetic") for family in SYNTHETIC),
    *(
        pytest.param(
            family,
            "real",
            marks=pytest.mark.skipif(
                not (REAL / family / "tokenizer.json").exists(),
                reason=f"no real tokenizer of {family}: run scripts/tokenizers.sh",
            ),
        )
        for family in ("qwen3", "deepseek_v3", "deepseek_v4", "gpt_oss")
    ),
]
"""(family, kind of tokenizer)"""


@cache
def _real_tokenizer(family: str):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    directory = REAL / family
    if family == "gpt_oss":
        os.environ.setdefault("TIKTOKEN_ENCODINGS_BASE", str(directory))
    if family == "deepseek_v4":  # its configuration names a class that transformers does not know
        return PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    return AutoTokenizer.from_pretrained(directory)


@cache
def family(name: str, kind: str = "synthetic", thinking: bool = False) -> tuple[ChatRenderer, object]:
    if kind == "real":
        tokenizer = _real_tokenizer(name)
    else:
        template = CHATML if name in ("default", "text_tools") else None
        tokenizer = make_tokenizer(FAMILY_SPECIALS[name], template)
    return ChatRenderer(tokenizer, name, thinking=thinking), tokenizer


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


_REASONED = {
    "qwen3": "<think>\n{}\n</think>\n\n",
    "qwen35": "{}\n</think>\n\n",
    "qwen36": "{}\n</think>\n\n",
    "qwen38": "{}\n</think>\n\n",
    "glm45": "\n<think>{}</think>\n",
    "glm5": "{}</think>",
    "glm51": "{}</think>",
    "glm53": "{}</think>",
    "kimi_k2": "<think>{}</think>",
    "kimi_k25": "{}</think>",
    "deepseek_r1": "{}\n</think>\n",
    "deepseek_v4": "{}</think>",
    "minimax_m2": "{}\n</think>\n\n",
    "nemotron3": "{}\n</think>\n",
    "gpt_oss": "{}<|end|><|start|>assistant<|channel|>final<|message|>",
}
ALWAYS_THINKS = ("glm53", "deepseek_r1", "minimax_m2", "gpt_oss")
"""Families whose prompt opens reasoning whatever the configuration says."""
NEVER_THINKS = ("llama3", "deepseek_v3", "default", "text_tools")


def sampled_text(name: str, thinking: bool, text: str, reasoning: str) -> str:
    """A turn in the family's own markup, without what ends it."""
    if name in NEVER_THINKS or not (thinking or name in ALWAYS_THINKS):
        return "\n" + text if name == "glm45" else text
    return _REASONED[name].format(reasoning) + text


def reasons(name: str, thinking: bool) -> bool:
    return name not in NEVER_THINKS and (thinking or name in ALWAYS_THINKS)


def stop_before(name: str, tokenizer, role: str) -> int:
    """The stop token that the family's template writes after a turn of text when a message of `role` follows."""
    if name.startswith("glm"):
        marker = "<|observation|>" if role == "tool" else "<|user|>"
    elif name == "llama3":
        marker = "<|eot_id|>"
    elif name.startswith("deepseek"):
        marker = "<｜end▁of▁sentence｜>"
    elif name == "gpt_oss":
        marker = "<|call|>" if role == "tool" else "<|return|>"
    elif name == "minimax_m2":
        marker = "[e~["
    else:
        marker = "<|im_end|>"
    return tokenizer.convert_tokens_to_ids(marker)
