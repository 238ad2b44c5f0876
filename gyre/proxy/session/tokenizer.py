"""The policy's tokenizer, from disk only."""

import contextlib
import logging
from pathlib import Path
from typing import Any

import fastokens

from gyre.core.errors import ConfigError

log = logging.getLogger(__name__)

_PROBES = (
    "<|im_start|>user\nDon't  I'LL \tx=12345;// naïve e\u0301 漢字 한국어 🙂👩\u200d👧\r\n\r\n   end  ",
    "def f(a_b, *c):\n    return {'k': [1.5e-3, \"\\u00e9\"]}\n\n\n#### <|im_end|></s>",
    "½ ١٢٣ \u00a0\u3000\ufeffﬁ Å A\u030a\x00 x² हिन्दी में क्षि",
)
_NOT_ALWAYS_A_SPACE = "\u180e"
"""Is one to the regular expressions of fastokens, when it has no code of its own for a pattern, and else is none."""


class PolicyTokenizer:
    """A Hugging Face tokenizer that encodes what is new in a prompt, a tool's output above all, many times faster.

    `encode` is fastokens' and `decode` that of the library below transformers, whose own bookkeeping costs ten times as
    much as the work on a short text. It cannot be called for character offsets, so that renderers do not attribute
    every token to the text that it came from. Everything else is the tokenizer's."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._core = tokenizer.backend_tokenizer
        self._core.no_truncation()
        self._core.no_padding()
        self._fast = self._faster()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if self._fast is not None and _NOT_ALWAYS_A_SPACE not in text:
            # It refuses bytes that are missing in the vocabulary; the original leaves them out.
            with contextlib.suppress(ValueError):
                return self._quick(self._fast, text, add_special_tokens)
        return self._exact(text, add_special_tokens)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        """Exactly what the tokens say: spaces before punctuation are kept."""
        text: str = self._core.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def _faster(self) -> Any:
        """None for a tokenizer that fastokens does not know (not BPE, rare normalizers) or reads differently."""
        try:
            fast = fastokens.Tokenizer.from_json_str(self._core.to_str())
            same = all(
                self._quick(fast, text, special) == self._exact(text, special)
                for text in _PROBES
                for special in (False, True)
            )
        except ValueError as error:
            log.info("fastokens does not take this tokenizer (%s): prompts are encoded at the usual speed", error)
            return None
        if not same:
            log.warning("fastokens encodes otherwise than this tokenizer: prompts are encoded at the usual speed")
        return fast if same else None

    def _quick(self, fast: Any, text: str, add_special_tokens: bool) -> list[int]:
        # `split_special_tokens` of tokenizer_config.json, which tokenizer.json does not tell.
        split = self._core.encode_special_tokens
        ids: list[int] = fast.encode(text, add_special_tokens=add_special_tokens, split_special_tokens=split).ids
        return ids

    def _exact(self, text: str, add_special_tokens: bool) -> list[int]:
        # Of one text; unlike the library's `encode` it keeps no character offsets.
        (encoding,) = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def __getattr__(self, name: str) -> Any:
        if name == "__call__":
            raise AttributeError(name)
        return getattr(self._tokenizer, name)


def load_tokenizer(directory: str) -> PolicyTokenizer:
    """Takes `tokenizer.json` as it is. Raises ConfigError when the directory holds none."""
    # Not AutoTokenizer, which imports torch and builds some tokenizers anew from their vocabulary.
    from transformers import PreTrainedTokenizerFast  # takes a second to import

    if not (Path(directory) / "tokenizer.json").is_file():
        raise ConfigError(f"{directory} has no tokenizer.json; name the directory with the policy's tokenizer.")
    return PolicyTokenizer(PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True))
