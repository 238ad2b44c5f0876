"""Token ids as text, in bounded pieces, with the tokenizer of the policy when it is still where the config says."""

import tomllib
from collections.abc import Callable

from tokenizers import Tokenizer

from gyre.store import RunDir

Decode = Callable[[list[int]], str]
MAX_CHARACTERS = 600
MAX_IDS = 40


def decoder(run: RunDir) -> Decode | None:
    """Token ids → text with the tokenizer of the policy that the run's config names; None when it is not there."""
    config = tomllib.loads(run.config.read_text())
    model = config.get("policy", {}).get("model")
    if model is None or not (run.root / model / "tokenizer.json").is_file():
        return None
    tokenizer = Tokenizer.from_file(str(run.root / model / "tokenizer.json"))

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    return decode


def excerpt(ids: list[int], decode: Decode | None) -> str:
    """Begin and end of the text, at most MAX_CHARACTERS of it; the first MAX_IDS ids without a decoder."""
    if decode is None:
        shown = " ".join(map(str, ids[:MAX_IDS]))
        return shown + (f" … ({len(ids)} tokens)" if len(ids) > MAX_IDS else "")
    text = decode(ids)
    if len(text) > MAX_CHARACTERS:
        half = MAX_CHARACTERS // 2
        text = f"{text[:half]} … ({len(text) - 2 * half} characters) … {text[-half:]}"
    return text


def whole(ids: list[int], decode: Decode | None) -> str:
    return " ".join(map(str, ids)) if decode is None else decode(ids)
