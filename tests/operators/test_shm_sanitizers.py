"""The shm fabric's memory accesses under sanitizers: ranks and thread groups as threads.

csrc/tests/shm_stress.cpp runs both operators at once, with chunks so small that rings wrap, checks
every byte, and counts sleeps that only a time limit ended. Broken copies of the fabric show that
these checks can fail.
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
    compile_stress,
    finds_race,
)

SOURCES = ("tests/shm_stress.cpp", "fabric/shm.cpp", "fabric/sum.cpp", "core/table.cpp")
# nodes, rails, nodes of a gather, chunk bytes, slots.
WORLDS = [(1, 4, 1, 64, 1), (2, 2, 2, 64, 2), (4, 2, 2, 64, 3), (2, 4, 2, 64, 1), (8, 1, 8, 64, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stress")


def _run(
    program: Path, world: tuple[int, ...], calls: int, workers: int, seed: int = 1
) -> subprocess.CompletedProcess[str]:
    arguments = [str(x) for x in (*world, calls, seed, workers, 20)]
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run(
        [str(program), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
    )


def _late(result: subprocess.CompletedProcess[str]) -> int:
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    return int(result.stdout.split()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("flags", [THREAD, ADDRESS], ids=["thread", "address"])
@pytest.mark.parametrize(
    "workers",
    [pytest.param(1, marks=pytest.mark.long), 16],
    ids=["one_thread", "thread_per_group"],
)
def test_sanitizers_find_nothing(folder: Path, flags: tuple[str, ...], workers: int) -> None:
    """No race, no stray access, no wrong byte; and no sleep that a ring should have ended.

    A writer that loses the processor just before it rings looks like a lost ring: two are allowed.
    """
    program = compile_stress(folder, flags, None, SOURCES)
    assert sum(_late(_run(program, world, 15, workers)) for world in WORLDS) <= 2


@pytest.mark.long
@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("seed", range(2, 5))
def test_sanitizers_find_nothing_at_length(folder: Path, world: tuple[int, ...], seed: int) -> None:
    assert _late(_run(compile_stress(folder, THREAD, None, SOURCES), world, 150, 16, seed)) <= 2


# What must be noticed: a store that is not released, and data behind its own signal.
RACES = {
    "finish": (
        "fabric/shm.h",
        "own_.words->finished.fetch_add(1);",
        "own_.words->finished.fetch_add(1, std::memory_order_relaxed);",
    ),
    "enter": (
        "fabric/shm.h",
        "own_.words->entered = number;",
        "own_.words->entered.store(number, std::memory_order_relaxed);",
    ),
    "put": (
        "fabric/shm.h",
        "c_.nodes[node].words->signal(signal).fetch_add(1);",
        "c_.nodes[node].words->signal(signal).fetch_add(1, std::memory_order_relaxed);",
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("finish", marks=pytest.mark.slow),
        pytest.param("enter", marks=pytest.mark.long),
        pytest.param("put", marks=pytest.mark.long),
    ],
)
def test_a_missing_release_is_found(folder: Path, name: str) -> None:
    """Control: without its memory order each of the three flags is a race."""
    program = compile_stress(folder, THREAD, RACES[name], SOURCES)
    assert any(finds_race(_run(program, (2, 2, 2, 64, 1), 15, 16, seed)) for seed in TRIES)


@pytest.mark.slow
def test_a_lost_ring_is_counted(folder: Path) -> None:
    """Control: if nobody rings, the time limit of sleeping ends them, and that is noticed."""
    deaf = ("fabric/shm.cpp", "if (sleepers == 0) return;", "return;")
    assert _late(_run(compile_stress(folder, PLAIN, deaf, SOURCES), (1, 4, 1, 64, 1), 3, 1)) > 2
