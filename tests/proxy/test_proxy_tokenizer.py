"""The policy's tokenizer is read without torch, and reads as transformers would."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from gyre.core.errors import ConfigError
from gyre.proxy.tokenizer import load_tokenizer

REPOSITORY = Path(__file__).parents[2]
REAL = REPOSITORY / ".cache" / "tokenizers" / "qwen3"
TEXTS = (
    "<|im_start|>user\nhi<|im_end|>\n<think>\n\n</think>\n",
    "don't I'LL  x = 12345;\t// naïve 漢字 🙂\r\n\r\n   end  ",
    (REPOSITORY / "docs" / "harnesses.md").read_text(encoding="utf-8"),
)
LOAD = """
import sys
import gyre.proxy.worker
from gyre.proxy.tokenizer import load_tokenizer
from gyre.trajectory.render import ChatRenderer
for family in ("qwen3", "text_tools"):
    ChatRenderer(load_tokenizer(sys.argv[1]), family, thinking=False)
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    "directory",
    [
        REPOSITORY / "examples" / "policy" / "tiny",
        pytest.param(
            REAL, marks=pytest.mark.skipif(not REAL.exists(), reason="no real tokenizer: run scripts/tokenizers.sh")
        ),
    ],
    ids=lambda directory: directory.name,
)
def test_same_ids_as_the_tokenizer_that_transformers_chooses(directory: Path) -> None:
    ours, theirs = load_tokenizer(str(directory)), AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
        assert ours.decode(ids) == text
    assert (ours.eos_token_id, ours.unk_token_id) == (theirs.eos_token_id, theirs.unk_token_id)
    assert ours.chat_template == theirs.chat_template


def test_a_proxy_worker_does_without_torch() -> None:
    command = [sys.executable, "-c", LOAD, str(REPOSITORY / "examples" / "policy" / "tiny")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
