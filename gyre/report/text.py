"""Text of a run for people: token ids decoded in bounded pieces, and nothing that steers a terminal or a page.

Ids are decoded with the tokenizer of the policy when it is still where the config says.
"""

import tomllib
from collections.abc import Callable

from tokenizers import Tokenizer

from gyre.store import RunDir

Decode = Callable[[list[int]], str]
MAX_CHARACTERS = 600
MAX_IDS = 40

_BIDI = [*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C]
_VISIBLE = (
    {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
    | dict.fromkeys(range(0x7F, 0xA0), 0xFFFD)
    | dict.fromkeys(_BIDI, 0xFFFD)
    | {0x7F: 0x2421}
)


def visible(text: str) -> str:
    """Control characters, and those that change the direction of text, replaced by ones that only show."""
    return text.translate(_VISIBLE)


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
    return visible(text)


def whole(ids: list[int], decode: Decode | None) -> str:
    return " ".join(map(str, ids)) if decode is None else visible(decode(ids))
