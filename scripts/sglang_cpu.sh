#!/usr/bin/env bash
# Sets up .cache/sglang/venv: SGLang 0.5.23 on a CPU, for tests only (3.2 GB, about two minutes). Nothing of CUDA is
# installed; tests/engines/sglang_cpu stands in for what is missing. Skips what is already there.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.cache/sglang/venv
stamp=$(cat "$0" tests/engines/sglang_cpu/requirements.txt | sha256sum | cut -d' ' -f1)
[ "$(cat $venv/.gyre-stamp 2>/dev/null)" != "$stamp" ] || exit 0

free_mb=$(df --output=avail -m . | tail -1)
((free_mb > 6000)) || { echo "sglang_cpu: $free_mb MB free; 6000 are needed" >&2; exit 1; }
echo "sglang_cpu: installing SGLang for CPUs into $venv"
rm -rf $venv
${PYTHON:-python3} -m venv $venv
pip="$venv/bin/pip install -q --disable-pip-version-check"
# Without dependencies: theirs are CUDA wheels. The list beside holds those that a CPU needs.
$pip --no-deps sglang==0.5.23 torch==2.13.0 torchvision==0.28.0 torch_memory_saver==0.0.10 triton==3.9.0 2>/dev/null
$pip -r tests/engines/sglang_cpu/requirements.txt 2>/dev/null
$venv/bin/python -c 'import torch; assert torch.version.cuda is None, "pip took a CUDA build of torch"'
echo "$PWD/tests/engines/sglang_cpu" >"$($venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/gyre_sglang_cpu.pth"
echo "$stamp" >$venv/.gyre-stamp
