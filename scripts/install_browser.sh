#!/usr/bin/env bash
# Get the headless Chromium that the tests of the planner's report use; nothing to do if one is there.
# Debian's or Ubuntu's package where this user may install it, else playwright's own build.
# Without a browser those tests are skipped, and say so.
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
python=${1:-$root/.venv/bin/python}
there() {
  "$python" - "$root" <<'END'
import sys
sys.path.insert(0, sys.argv[1])
from tests.planner.browser import NoBrowser, running
try:
    with running() as browser:
        print(f"browser: Chromium {browser.version}")
except NoBrowser:
    sys.exit(1)
END
}
if [[ ! -x $python ]]; then
  echo "error: no environment in ${python%/bin/python}: make it with scripts/setup_env.py --extra dev" >&2
  exit 2
fi
if there; then exit 0; fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
  echo "browser: installing chromium-headless-shell"
  if { timeout 300 apt-get update && timeout 600 apt-get install -y --no-install-recommends chromium-headless-shell fonts-dejavu-core; } >"$log" 2>&1 && there; then
    exit 0
  fi
fi
echo "browser: installing playwright's Chromium"
if timeout 600 "$python" -m playwright install --only-shell chromium >"$log" 2>&1 && there; then exit 0; fi
echo "error: no Chromium could be installed: $(grep -m1 -i error "$log" || tail -n1 "$log")" >&2
exit 1
