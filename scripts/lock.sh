#!/usr/bin/env bash
# Writes requirements/lock.txt: every package of the CPU stack at the version that pip chooses today, for `pip install -c`.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
report=$(mktemp); trap 'rm -f "$report"' EXIT
"$python" -m pip install -q --disable-pip-version-check --dry-run --ignore-installed --report "$report" \
  -r requirements/cpu.txt -r requirements/dev.txt 2> >(grep -v "is ignored: it is neither" >&2)
"$python" - "$report" >requirements/lock.txt <<'P'
import json, sys
found = {i["metadata"]["name"].lower(): i["metadata"]["version"] for i in json.load(open(sys.argv[1]))["install"]}
print("# Made by scripts/lock.sh; for `pip install -c requirements/lock.txt`.")
# A local version such as +cpu names a build, which other indexes do not have.
print("\n".join(f"{name}=={version.partition('+')[0]}" for name, version in sorted(found.items())))
P
