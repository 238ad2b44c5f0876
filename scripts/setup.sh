#!/usr/bin/env bash
# Sets up one machine: system packages, .venv with the pinned CPU stack, harnesses. Skips what is already there.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

die() { echo "setup: $*" >&2; exit 1; }

command -v "$python" >/dev/null || die "no $python; install Python 3.11 or newer, or name one: make setup PYTHON=/path/to/python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "$python is older than 3.11; name a newer one: make setup PYTHON=/path/to/python"
command -v npm >/dev/null || die "no npm; install Node.js 20 or newer, the harnesses come from the npm registry"

stamp=$(cat requirements/*.txt pyproject.toml setup.py "$0" | sha256sum | cut -d' ' -f1)
if [ "$(cat .venv/.gyre-stamp 2>/dev/null)" != "$stamp" ]; then
  echo "setup: installing Python packages into .venv (about two minutes)"
  [ -x .venv/bin/python ] || "$python" -m venv .venv || die "could not create .venv (on Debian: apt-get install python3-venv)"
  .venv/bin/pip install -q --disable-pip-version-check -r requirements/cpu.txt -r requirements/dev.txt -c requirements/lock.txt 2> >(grep -v "is ignored: it is neither" >&2)
  .venv/bin/pip uninstall -q -y gyre 2>/dev/null  # what this project was called, or the other one of that name
  .venv/bin/pip install -q --disable-pip-version-check --no-deps -e . 2> >(grep -v "is ignored: it is neither" >&2)
  echo "$stamp" >.venv/.gyre-stamp
fi

.venv/bin/gyre setup --system claude_code mini_swe_agent
