#!/usr/bin/env bash
# Smoke-run job configs, one after the other: scripts/smoke.sh [CONFIG ...] [--line X ...]
# Each runs as `run_train.sh --config CONFIG --smoke`: five steps of a toy on 4 CPU ranks. Without
# CONFIG: all of train_configs/ except those that others build on. With --line, once for each line.
# Prints a table; exit status 1 if a run failed, 2 after bad arguments.
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
seconds=600 # of one run at most

configs=() lines=()
while (($#)); do
  case $1 in
    --line=*) lines+=("${1#--line=}") ;;
    --line)
      [[ ${2:-} ]] || { echo "error: --line: expected A, B, C or torch" >&2; exit 2; }
      lines+=("$2")
      shift
      ;;
    -h | --help) sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
    -*) echo "error: $1: unknown option; expected [CONFIG ...] [--line X ...]" >&2; exit 2 ;;
    *) configs+=("$1") ;;
  esac
  shift
done
for line in "${lines[@]}"; do
  [[ $line =~ ^(A|B|C|torch)$ ]] || { echo "error: --line $line: expected A, B, C or torch" >&2; exit 2; }
done
if ((!${#configs[@]})); then
  bases=$(sed -n 's/^base *= *"\(.*\)"/\1/p' "$root"/train_configs/*.toml)
  for path in "$root"/train_configs/*.toml; do
    grep -qxF "$(basename "$path")" <<<"$bases" || configs+=("$(basename "$path")")
  done
fi
((${#lines[@]})) || lines=("")

# losses LOG: the first and the last loss of a run
losses() {
  sed -n 's/.*step: .*loss: *\([^ ]*\).*/\1/p' "$1" | sed -n '1p;$p' | paste -sd ' '
}

failed=0
row='%-28s %-5s %-6s %9s %9s %7s\n'
printf "$row" config line result "first" "last loss" seconds
for config in "${configs[@]}"; do
  for line in "${lines[@]}"; do
    name=$(basename "$config" .toml)
    folder=outputs/smoke/$name${line:+-$line}
    log=$folder/smoke.log
    mkdir -p "$folder"
    started=$SECONDS status=0
    timeout --kill-after 30 "$seconds" "$root/run_train.sh" --config "$config" --smoke \
      --dump_folder "$folder" ${line:+--line "$line"} >"$log" 2>&1 || status=$?
    read -r first last <<<"$(losses "$log")" || true
    result=ok
    # Numbers, and all steps: a job that ends early, or without a loss, is no success.
    if ((status)) || ! grep -q 'done: step 5 of 5' "$log" || [[ ! ${last:-} =~ ^[0-9.]+$ ]]; then
      result=failed failed=1
    fi
    printf "$row" "$name" "${line:-file}" "$result" "${first:--}" "${last:--}" $((SECONDS - started))
    if [[ $result == failed ]]; then
      echo "  status $status, $log: $(grep -m 1 '^error' "$log" || tail -n 1 "$log")"
    fi
  done
done
exit $failed
