# Sourced by run_train.sh and scripts/test.sh: finds a Python and makes the environment.

# ensure_env [options of setup_env.py]
ensure_env() {
  local name
  for name in python3.11 python3.12 python3.13 python3 python; do
    if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      "$name" "$root/scripts/setup_env.py" "$@"
      return
    fi
  done
  echo "error: Python 3.11 or newer is needed and was not found on PATH" >&2
  return 2
}
