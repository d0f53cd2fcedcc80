"""Tile sizes of the sm_80 kernel, for the code that compiles it and the code that launches it.

Why these: one warp of a 2 x 2 grid makes 64 x 64 results, so a 16-wide step of k costs it 4 + 4
``ldmatrix.x4`` for 32 ``mma.m16n8k16``; with 32 x 64 it would read shared memory half as much
again for each ``mma``. The 128 float32 accumulators of a thread, the operands' fragments and the
addresses come to 173 to 217 registers (ptxas 13.0): no spills, and two blocks share an sm_80
multiprocessor. Four stages of two 128 x 32 tiles of 16-bit elements are 64 KiB: three loads are
under way while one stage is read, two blocks fit the 164 KiB of sm_80, one fits the 100 KiB of
sm_86 and sm_89.
"""

from __future__ import annotations

TILE = 128
"""Rows and columns of the result that one thread block makes."""
DEPTH = 32
"""Columns of the operands that one pipeline stage holds."""
STAGES = 4
"""Pipeline stages, one of which is being read."""
THREADS = 128
"""Threads of a block: four warps, two by two."""
VECTOR = 8
"""16-bit elements in one 16-byte copy; m and k must be multiples of it."""
PITCH = TILE + VECTOR
"""Elements between rows of a result tile in shared memory.

The padding puts 8 rows that a warp writes at once into different banks.
"""
SHARED_BYTES = 2 * max(2 * TILE * DEPTH * STAGES, TILE * PITCH)
"""Shared memory of a block: the stages, and after them, in the same place, the result tile."""


def grid(m: int, batch: int) -> tuple[int, int, int]:
    """Blocks of a launch: one per tile on or below the diagonal, and one layer per matrix."""
    tiles = -(-m // TILE)
    return tiles * (tiles + 1) // 2, batch, 1


MAX_EXTENT = 2**22
"""Largest m and k: the kernel counts tiles, and places inside a tile, in 32 bits."""
MAX_BATCH = 65535
"""Largest number of matrices in one launch: CUDA's limit for the second grid dimension."""
