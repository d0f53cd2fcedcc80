#!/usr/bin/env bash
# Train from a job config: ./run_train.sh [--config FILE] [--section.key value ...], see --help.
# Several nodes: set NNODES, NODE_RANK, MASTER_ADDR (scripts/multinode.slurm). NGPU: ranks per node.
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
source "$root/scripts/env.sh"
ensure_env
# -P: a file of the current folder must not stand in for a module of the same name.
exec "$root/.venv/bin/python" -P -m torchtitan_dmuon.launch "$@"
