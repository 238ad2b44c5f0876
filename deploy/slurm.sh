#!/bin/bash
# One run on several nodes: a Ray cluster for the time of the job, the controller on its head.
#   sbatch --nodes=4 deploy/slurm.sh run.toml [section.key=value …]
# Needs on every node: the same environment at the same path ($GYRE_VENV), bubblewrap on the head, the model and the run
# directory on a shared path. The configuration has [launch] kind = "ray" and [transport] kind = "mooncake".
#SBATCH --job-name=gyre
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --signal=B:TERM@180   # three minutes for an orderly end before the time is up
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: sbatch $0 CONFIG [section.key=value …]" >&2; exit 2; }
config=$1; shift
source "${GYRE_VENV:?name the environment that every node has}/bin/activate"
port=${GYRE_RAY_PORT:-6379}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=$(srun --nodes=1 --ntasks=1 -w "${nodes[0]}" hostname --ip-address | awk '{print $1}')
address=$head:$port
run=${GYRE_RUN:-runs/$(basename "$config" .toml)-$SLURM_JOB_ID}

# A head whose gcs fails ends the job; workers that fail end with it.
srun --nodes=1 --ntasks=1 -w "${nodes[0]}" --overlap ray start --head --node-ip-address="$head" --port="$port" --block &
if (( ${#nodes[@]} > 1 )); then
  srun --nodes=$(( ${#nodes[@]} - 1 )) --ntasks=$(( ${#nodes[@]} - 1 )) -x "${nodes[0]}" --overlap \
    ray start --address="$address" --block &
fi
for _ in $(seq 120); do
  [ "$(srun --nodes=1 --ntasks=1 -w "${nodes[0]}" --overlap ray list nodes --filter state=ALIVE --format json 2>/dev/null |
    python3 -c 'import json, sys; print(len(json.load(sys.stdin)))' 2>/dev/null)" = "${#nodes[@]}" ] && break
  sleep 2
done

# The same job id again (requeue) goes on with the run.
if [ -f "$run/config.toml" ]; then arguments=(--resume "$run" "launch.address=$address"); else
  arguments=("$config" "launch.address=$address" "$@" --run-dir "$run"); fi
srun --nodes=1 --ntasks=1 -w "${nodes[0]}" --overlap gyre train "${arguments[@]}" &
train=$!
trap 'kill -TERM $train' TERM
code=0; wait $train || code=$?
# A signal ends the wait before the run.
kill -0 $train 2>/dev/null && { code=0; wait $train || code=$?; }
exit "$code"
