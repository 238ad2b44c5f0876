#!/usr/bin/env bash
# Sets up .cache/mooncake: the Mooncake Transfer Engine beside .venv, to be put on PYTHONPATH. Skips what is there.
set -euo pipefail
cd "$(dirname "$0")/.."
version=0.3.13.post1
[ "$(cat .cache/mooncake/.gyre-stamp 2>/dev/null)" != "$version" ] || exit 0

ldconfig -p | grep -q libibverbs.so.1 || apt-get install -y -qq libibverbs1 >/dev/null ||
  { echo "mooncake: libibverbs1 is missing; install it with this system's package manager" >&2; exit 1; }
rm -rf .cache/mooncake
# Its engine needs none of its dependencies; they belong to its store.
.venv/bin/pip install -q --disable-pip-version-check --no-deps --target .cache/mooncake \
  "mooncake-transfer-engine-non-cuda==$version" 2>/dev/null
echo "$version" >.cache/mooncake/.gyre-stamp
