#!/usr/bin/env bash
# Set up, then lint, type-check and test: scripts/test.sh [--torch VERSION] [pytest arguments]
# --torch runs the tests with another torch release, in an environment of its own.
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
source "$root/scripts/env.sh"
venv=$root/.venv
options=(--extra dev)
if [[ ${1:-} == --torch || ${1:-} == --torch=* ]]; then
  if [[ $1 == --torch ]]; then version=${2:-}; shift; else version=${1#--torch=}; fi
  [[ $version =~ ^[0-9]+(\.[0-9]+)+$ ]] || { echo "error: --torch: expected a version, e.g. 2.14.1, got '$version'" >&2; exit 2; }
  options+=(--torch "$version")
  venv=$root/.venv-torch-$version
  shift
fi
ensure_env "${options[@]}"
cd "$root"
# The tests of the planner's page run in it; without one they are skipped, and say so.
scripts/install_browser.sh "$venv/bin/python" || true
echo "test: ruff and mypy"
"$venv/bin/ruff" check --quiet .
"$venv/bin/ruff" format --check --quiet .
"$venv/bin/mypy" --no-error-summary
echo "test: pytest"
# Two files at a time, as many as the smallest machine has cores; -n 0 runs one after the other.
exec "$venv/bin/python" -m pytest -n 2 --dist loadfile "$@"
