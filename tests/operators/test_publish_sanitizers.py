"""The publish under sanitizers: ranks as threads of one process.

csrc/tests/publish_stress.cpp runs update, call and gather of every rank beside each other over the
shm fabric, checks every byte, and counts sleeps that only a time limit ended.
csrc/tests/publish_block.cpp runs what the GPU's kernels do, with three host threads for a block.
Broken copies show that these checks can fail.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.operators.stressing import (
    ADDRESS,
    PLAIN,
    THREAD,
    TRIES,
    Change,
    compile_stress,
    finds_race,
)

SOURCES = (
    "tests/publish_stress.cpp",
    "fabric/shm.cpp",
    "fabric/sum.cpp",
    "core/table.cpp",
    "core/publish_table.cpp",
)
BLOCK_SOURCES = ("tests/publish_block.cpp", "core/table.cpp", "core/publish_table.cpp")
# nodes, tile bytes, tiles on their way
WORLDS = [(1, 64, 1), (2, 64, 1), (3, 64, 2), (4, 64, 8), (8, 128, 3)]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("publish")


def _run(
    program: Path, world: tuple[int, ...], steps: int, *, seed: int = 1, pause: int = 200
) -> subprocess.CompletedProcess[str]:
    return _execute(program, *world, steps, seed, 20, pause)


def _execute(program: Path, *arguments: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), *(str(x) for x in arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
    )


def _late(result: subprocess.CompletedProcess[str]) -> int:
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    return int(result.stdout.split()[-1])


@pytest.mark.parametrize("flags", [THREAD, ADDRESS], ids=["thread", "address"])
def test_sanitizers_find_nothing(folder: Path, flags: tuple[str, ...]) -> None:
    """No race, no stray access, no wrong byte; and no sleep that a ring should have ended.

    A writer that loses the processor just before it rings looks like a lost ring: two are allowed.
    """
    program = compile_stress(folder, flags, None, SOURCES)
    assert sum(_late(_run(program, world, 30)) for world in WORLDS) <= 2


@pytest.mark.long
@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("seed", range(2, 5))
def test_sanitizers_find_nothing_at_length(folder: Path, world: tuple[int, ...], seed: int) -> None:
    """The same for hundreds of steps."""
    assert _late(_run(compile_stress(folder, THREAD, None, SOURCES), world, 400, seed=seed)) <= 2


RELAXED = "std::memory_order_relaxed"
RACES: dict[str, Change] = {
    "release": (
        "fabric/shm_publish.h",
        "released = count;",
        f"released.store(count, {RELAXED});",
    ),
    "arrival": (
        "fabric/shm.h",
        "c_.nodes[node].words->signal(signal).fetch_add(1);",
        f"c_.nodes[node].words->signal(signal).fetch_add(1, {RELAXED});",
    ),
    "flag": (
        "fabric/shm_publish.h",
        "steps[number] = step;",
        f"steps[number].store(step, {RELAXED});",
    ),
}


@pytest.mark.parametrize(
    "name", ["release", *(pytest.param(x, marks=pytest.mark.long) for x in ("arrival", "flag"))]
)
def test_a_missing_release_is_found(folder: Path, name: str) -> None:
    """Control: without its memory order each of the three words is a race."""
    program = compile_stress(folder, THREAD, RACES[name], SOURCES)
    assert any(finds_race(_run(program, (3, 64, 2), 60, seed=seed)) for seed in TRIES)


@pytest.mark.parametrize("world", [(1, 64, 1), (3, 64, 2)], ids=str)
def test_the_kernels_have_no_race(folder: Path, world: tuple[int, ...]) -> None:
    """All threads of a block do the same, or its barriers would hang; releases and flags order the
    bytes."""
    program = compile_stress(folder, THREAD, None, BLOCK_SOURCES)
    result = _execute(program, *world, 20, 1)
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]


@pytest.mark.parametrize(
    "word", ["released, count", pytest.param("flags + number, step", marks=pytest.mark.long)]
)
def test_a_missing_release_of_the_kernels_is_found(folder: Path, word: str) -> None:
    """Control: a store that orders nothing is a race."""
    place, value = word.split(", ")
    change: Change = (
        "kernels/publish_block.cuh",
        f"  store_release(control.{place}, {value});\n",
        f"  __atomic_store_n(control.{place}, {value}, __ATOMIC_RELAXED);\n",
    )
    program = compile_stress(folder, THREAD, change, BLOCK_SOURCES)
    assert any(finds_race(_execute(program, 3, 64, 2, 20, seed)) for seed in TRIES)


def test_a_lost_ring_is_counted(folder: Path) -> None:
    """Control: if releases do not wake the call, its sleep's limit does, and that is noticed."""
    deaf: Change = ("fabric/shm_publish.h", "publisher.ring();", "")
    program = compile_stress(folder, PLAIN, deaf, SOURCES)
    assert _late(_run(program, (1, 64, 2), 16, pause=30_000)) > 2
