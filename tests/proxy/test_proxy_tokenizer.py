"""The policy's tokenizer is read without torch, and reads as transformers would, only faster."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gyre.core.errors import ConfigError
from gyre.proxy.session.tokenizer import PolicyTokenizer, load_tokenizer

REPOSITORY = Path(__file__).parents[2]
TINY = REPOSITORY / "examples" / "policy" / "tiny"
REAL = ("qwen3", "deepseek_v3", "deepseek_v4", "gpt_oss")
TEXTS = (
    "<|im_start|>user\nhi<|im_end|>\n<think>\n\n</think>\n",
    "don't I'LL  x = 12345;\t// naïve 漢字 🙂\r\n\r\n   end  ",
    (REPOSITORY / "docs" / "harnesses.md").read_text(encoding="utf-8"),
)
LOAD = """
import sys
import gyre.proxy.worker
from gyre.proxy.session.tokenizer import load_tokenizer
from gyre.chat.render import ChatRenderer
for family in ("qwen3", "text_tools"):
    ChatRenderer(load_tokenizer(sys.argv[1]), family, thinking=False)
assert "torch" not in sys.modules
"""


PIECES = st.one_of(
    st.text(max_size=20),
    st.text("abXY019 .,'_-/\\\"<|>\n\t", max_size=40),
    st.sampled_from(["<|im_end|>", "<|im_", "</think>", "\r\n", "'LL", "e\u0301", "👩\u200d👧", "１２", "x" * 300]),
    st.sampled_from(TEXTS[2].splitlines()),
)


def directory_of(name: str) -> Path:
    directory = TINY if name == "tiny" else REPOSITORY / ".cache" / "tokenizers" / name
    if not directory.exists():
        pytest.skip("no real tokenizer: run scripts/tokenizers.sh")
    return directory


@pytest.mark.parametrize("name", ["tiny", "qwen3"])
def test_same_ids_as_the_tokenizer_that_transformers_chooses(name: str) -> None:
    directory = directory_of(name)
    ours, theirs = load_tokenizer(str(directory)), AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
        assert ours.decode(ids) == text
    assert (ours.eos_token_id, ours.unk_token_id) == (theirs.eos_token_id, theirs.unk_token_id)
    assert ours.chat_template == theirs.chat_template


@pytest.mark.parametrize("name", ["tiny", *REAL])
def test_the_fast_encoder_takes_every_text_like_the_original(name: str) -> None:
    tokenizer = load_tokenizer(str(directory_of(name)))
    assert tokenizer._fast is not None

    @given(st.lists(PIECES, max_size=12).map("".join), st.booleans())
    def same(text: str, special: bool) -> None:
        ids = tokenizer.encode(text, add_special_tokens=special)
        assert ids == tokenizer.backend_tokenizer.encode(text, add_special_tokens=special).ids

    same()


def test_a_tokenizer_that_is_not_bpe_encodes_as_it_did() -> None:
    core = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PolicyTokenizer(PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?"))
    assert tokenizer._fast is None
    assert tokenizer.encode("b a é", add_special_tokens=False) == [1, 0, 2]


def test_bytes_that_the_vocabulary_lacks_are_left_out() -> None:
    letters = {letter: i for i, letter in enumerate(sorted({*pre_tokenizers.ByteLevel.alphabet()} - {"ò"}))}
    core = Tokenizer(models.BPE(vocab=letters, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PolicyTokenizer(PreTrainedTokenizerFast(tokenizer_object=core))
    assert tokenizer._fast is not None
    lacking = chr(0x80000)  # begins with the byte 0xf2, which is written as "ò"
    ids = tokenizer.encode(f"a{lacking}b", add_special_tokens=False)
    assert ids == core.encode(f"a{lacking}b").ids
    assert len(ids) == 5


@pytest.mark.parametrize("text", ["  \u180e", "\u180e's"])
def test_a_character_that_only_some_libraries_take_for_a_space(text: str) -> None:
    tokenizer = load_tokenizer(str(TINY))
    assert tokenizer.encode(text) == tokenizer.backend_tokenizer.encode(text).ids


def test_special_tokens_stay_text_where_the_configuration_says_so() -> None:
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=letters, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.add_special_tokens(["<s>"])
    tokenizer = PolicyTokenizer(PreTrainedTokenizerFast(tokenizer_object=core, split_special_tokens=True))
    assert tokenizer._fast is not None
    assert tokenizer.encode("a<s>b", add_special_tokens=False) == [letters[letter] for letter in "a<s>b"]


def test_a_pattern_whose_words_differ_is_encoded_as_it_was() -> None:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\w+|\s+|[^\w\s]+"), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(["हिन्दी में क्षि"] * 9, trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    tokenizer = PolicyTokenizer(PreTrainedTokenizerFast(tokenizer_object=core))
    assert tokenizer.encode("हिन्दी") == core.encode("हिन्दी").ids


def test_a_proxy_worker_does_without_torch() -> None:
    command = [sys.executable, "-c", LOAD, str(TINY)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
