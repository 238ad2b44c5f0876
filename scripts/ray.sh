#!/usr/bin/env bash
# Sets up .cache/ray: Ray beside .venv, to be put on PYTHONPATH (200 MB). Skips what is there.
set -euo pipefail
cd "$(dirname "$0")/.."
version=2.60.0
[ "$(cat .cache/ray/.gyre-stamp 2>/dev/null)" != "$version" ] || exit 0

rm -rf .cache/ray
# Without dependencies: .venv has the rest of them, and another protobuf or grpc in front of its own would replace them.
.venv/bin/pip install -q --disable-pip-version-check --no-deps --target .cache/ray "ray==$version" \
  jsonschema==4.26.0 jsonschema-specifications==2025.9.1 referencing==0.37.0 rpds-py==2026.9.1 attrs==26.1.0 \
  msgpack==1.2.4 protobuf==7.36.2 2>/dev/null
echo "$version" >.cache/ray/.gyre-stamp
