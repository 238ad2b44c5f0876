"""The policy's tokenizer, from disk only."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from gyre.core.errors import ConfigError

_SHORT = 32


class PolicyTokenizer:
    """A Hugging Face tokenizer without what the proxy never asks of it.

    `encode` and `decode` go straight to the library below: transformers' own bookkeeping costs ten times as much as
    the work on a short text. And it cannot be called for character offsets, so that renderers do not attribute every
    token to the text that it came from. Everything else is the tokenizer's."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._core = tokenizer.backend_tokenizer
        self._core.no_truncation()
        self._core.no_padding()
        # Templates put the same few short texts between messages, in every prompt.
        self._encode_short = lru_cache(maxsize=1024)(self._encode)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list((self._encode_short if len(text) <= _SHORT else self._encode)(text, add_special_tokens))

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        """Exactly what the tokens say: spaces before punctuation are kept."""
        text: str = self._core.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Of one text; unlike `encode` it keeps no character offsets.
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
