#!/usr/bin/env python3
"""Make the virtual environment of this checkout: what run_train.sh and scripts/test.sh do first.

Standard library only. Prints nothing when the environment is up to date. Two set-ups at the same
time are safe: the second waits for the first.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = "torchtitan_dmuon.json"
LOCK_SECONDS = 1800
# A peer that tests compare with. Its own requirements pin kernels for GPUs, which tests do without.
WITHOUT_REQUIREMENTS = {"dev": ["gram-newton-schulz"]}
# NCCL's headers, for tests that compile against them. No constraint: a CUDA build of torch brings
# the one version that it runs with, and could not be installed beside another.
UNLESS_TORCH_BRINGS_IT = {"dev": {"nvidia-nccl-cu13": "2.30.7"}}


class SetupError(Exception):
    """Set-up failed; the message is the one line that matters."""


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def fingerprint(torch: str | None) -> str:
    """Digest of everything that decides what the environment must contain."""
    files = [ROOT / n for n in ("pyproject.toml", "setup.py", "constraints.txt")]
    files.append(Path(__file__))
    files += sorted((ROOT / "patches").rglob("*.patch"))
    digest = hashlib.sha256(f"{sys.version_info[:2]} {ROOT} {torch}".encode())
    for path in files:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def constraints(torch: str | None, folder: Path) -> Path:
    """Return the constraints file; another torch brings its own triton."""
    path = ROOT / "constraints.txt"
    if torch is None:
        return path
    lines = [x for x in path.read_text().splitlines() if not x.startswith(("torch==", "triton=="))]
    changed = folder / "constraints.txt"
    changed.write_text("\n".join([*lines, f"torch=={torch}", ""]))
    return changed


def run(command: list[str], log: Path, what: str) -> None:
    """Run a command with its output in a log; raise SetupError with its last error line."""
    with log.open("a") as out:
        out.write(f"$ {' '.join(command)}\n")
        out.flush()
        done = subprocess.run(
            command, check=False, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
    if done.returncode != 0:
        lines = [x for x in log.read_text(errors="replace").splitlines() if x.strip()]
        errors = [x for x in lines if x.lower().startswith(("error", "fatal"))]
        raise SetupError(f"{what} failed: {errors[0] if errors else lines[-1]} (all output: {log})")


def set_up(venv: Path, extras: set[str], torch: str | None) -> None:
    """Bring the environment up to date. Raises SetupError."""
    stamp = venv / STAMP
    wanted = fingerprint(torch)
    have = read_stamp(stamp)
    if have.get("fingerprint") == wanted:
        if extras <= set(have["extras"]):
            return
        extras |= set(have["extras"])
    python = venv / "bin" / "python"
    if (venv.exists() or venv.is_symlink()) and not venv.is_dir():
        raise SetupError(f"{venv} is not a folder: remove it")
    venv.mkdir(parents=True, exist_ok=True)
    log = venv / "setup.log"
    # Gone until all is done: a set-up that was killed half-way is started over.
    stamp.unlink(missing_ok=True)
    start = time.monotonic()
    if not works(python):
        say(f"making {venv}")
        # --clear empties the folder, so the output goes beside it until then.
        beside = Path(f"{venv}.log")
        run([sys.executable, "-m", "venv", "--clear", str(venv)], beside, "python -m venv")
        beside.unlink()
    say(f"installing dependencies (a few minutes; output in {log})")
    target = f"{ROOT}[{','.join(sorted(extras))}]" if extras else str(ROOT)
    limits = constraints(torch, venv)
    run([str(python), "-m", "pip", "install", "-c", str(limits), "-e", target], log, "pip install")
    for extra in sorted(extras & WITHOUT_REQUIREMENTS.keys()):
        alone = ["install", "-c", str(limits), "--no-deps", *WITHOUT_REQUIREMENTS[extra]]
        run([str(python), "-m", "pip", *alone], log, "pip install")
    for extra in sorted(extras & UNLESS_TORCH_BRINGS_IT.keys()):
        for name, version in UNLESS_TORCH_BRINGS_IT[extra].items():
            if not has(python, name):
                alone = ["install", "--no-deps", f"{name}=={version}"]
                run([str(python), "-m", "pip", *alone], log, "pip install")
    say("patching torchtitan")
    run([str(python), str(ROOT / "scripts" / "apply_patches.py")], log, "apply_patches.py")
    stamp.write_text(json.dumps({"fingerprint": wanted, "extras": sorted(extras)}))
    say(f"ready after {time.monotonic() - start:.0f} s")


def works(python: Path) -> bool:
    """Whether this is the Python of a whole environment, not of one that was killed half-way."""
    if not python.exists():
        return False
    try:
        done = subprocess.run([python, "-c", "import pip"], check=False, capture_output=True)
    except OSError:
        return False
    return done.returncode == 0


def has(python: Path, package: str) -> bool:
    """Whether a package is installed."""
    program = "import importlib.metadata as m, sys; m.distribution(sys.argv[1])"
    done = subprocess.run([python, "-c", program, package], check=False, capture_output=True)
    return done.returncode == 0


def read_stamp(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the virtual environment of this checkout.")
    parser.add_argument("--venv", type=Path, help="its folder (default: .venv in the checkout)")
    parser.add_argument(
        "--extra", action="append", default=[], help="optional dependencies, e.g. dev"
    )
    parser.add_argument("--torch", help="another torch release than the pinned one")
    options = parser.parse_args()
    default = ROOT / (f".venv-torch-{options.torch}" if options.torch else ".venv")
    venv = (options.venv or default).absolute()
    try:
        venv.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{venv}.lock", "w") as lock:
            wait_for(lock.fileno())
            set_up(venv, set(options.extra), options.torch)
    except (SetupError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


def wait_for(lock: int) -> None:
    """Take the lock, with a bound. Raises SetupError."""
    deadline = time.monotonic() + LOCK_SECONDS
    told = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise SetupError(f"another set-up has been running for {LOCK_SECONDS} s") from None
            if not told:
                say("another set-up is running, waiting for it")
                told = True
            time.sleep(0.2)


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
