"""Compiles the C++ stress programs, as they are or with one rule of theirs broken."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

from torchtitan_dmuon.native import sources_folder

THREAD = ("-O1", "-g", "-fsanitize=thread")
ADDRESS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
PLAIN = ("-O1",)

# ThreadSanitizer sees a race only where nothing else happened to order the two accesses, and waking
# a sleeper does: on a busy machine a control may miss with one seed what it finds with the next.
TRIES = range(1, 21)

Change = tuple[str, str, str]
"""File, text that occurs in it once, and what replaces it."""


@cache
def compile_stress(
    folder: Path, flags: tuple[str, ...], change: Change | None, sources: tuple[str, ...]
) -> Path:
    """Return the program that `sources` of csrc/ make with `flags`, changed if asked for."""
    root = sources_folder()
    if change is not None:
        root = Path(shutil.copytree(root, folder / str(abs(hash((flags, change))))))
        path = root / change[0]
        text = path.read_text()
        assert text.count(change[1]) == 1, f"{change[1]!r} is not once in {change[0]}"
        path.write_text(text.replace(change[1], change[2]))
    program = folder / f"stress-{abs(hash((flags, change, sources)))}"
    command = ["g++", "-std=c++17", *flags, f"-I{root}", "-o", str(program)]
    command += [str(root / source) for source in sources]
    subprocess.run([*command, "-pthread"], check=True)
    return program


def finds_race(result: subprocess.CompletedProcess[str]) -> bool:
    """Return whether ThreadSanitizer ended a program; any other failure of it is an error."""
    if result.returncode == 0:
        return False
    assert "data race" in result.stderr, (result.stdout + result.stderr)[-3000:]
    return True
