#!/usr/bin/env bash
# One prepared run of a few minutes on a machine with one Hopper GPU: are the kernels right, how fast
# is Newton-Schulz, does a small model train? scripts/device_check.sh [--output FILE] [--minutes 5]
# The machine needs this repository's environment, made beforehand and once:
#   python3 scripts/setup_env.py --extra dev --extra cu13
# (dev: pytest and the package gram-newton-schulz; cu13: NCCL and QuACK's kernels; cu12 where the
# driver asks for it). Nothing is installed or downloaded here: the minutes are for the GPU.
# --rehearse runs the same parts on a CPU at toy sizes. What is measured: scripts/device_check.py.
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
python=$root/.venv/bin/python
if [[ ! -x $python ]]; then
  echo "error: no environment in $root/.venv: make it with scripts/setup_env.py --extra dev --extra cu13" >&2
  exit 2
fi
# device_check.py ends by itself in time, and checks what it is given. This is the bound on it.
minutes=5
for ((i = 1; i <= $#; i++)); do
  case ${!i} in
    --minutes) next=$((i + 1)); value=${!next:-} ;;
    --minutes=*) value=${!i#--minutes=} ;;
    *) continue ;;
  esac
  if [[ $value =~ ^[1-9][0-9]?$ ]]; then minutes=$value; fi
done
exec timeout --foreground --kill-after=20 $((minutes * 60 + 30)) \
  "$python" "$root/scripts/device_check.py" "$@"
