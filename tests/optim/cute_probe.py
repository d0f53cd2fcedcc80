"""A kernel that decodes tile numbers as the sm_80 kernel does, and nothing else.

Imported only where nvidia-cutlass-dsl is installed.
"""

# No `from __future__ import annotations`: CuTe DSL reads the annotations of a kernel as objects.
from tempfile import TemporaryDirectory

import cutlass
import cutlass.cute as cute
from cutlass.base_dsl.compiler import DumpDir
from cutlass.cute.runtime import make_ptr

from torchtitan_dmuon.optim.symmetric_matmul.cute_sm80.kernel import _lower_tile

THREADS = 128


@cute.kernel
def _decode(indices: cute.Pointer, rows: cute.Pointer, columns: cute.Pointer) -> None:
    """rows[n], columns[n]: the tile of number indices[n], for every thread n of the grid."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    place = block * THREADS + thread
    i, j = _lower_tile(indices[place])
    rows[place] = i
    columns[place] = j


@cute.jit
def _launch(indices: cute.Pointer, rows: cute.Pointer, columns: cute.Pointer) -> None:
    _decode(indices, rows, columns).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])


def decoder_ptx() -> str:
    """PTX of the kernel: parameters are addresses of int32 numbers, rows and columns."""
    pointers = [make_ptr(cutlass.Int32, 16, cute.AddressSpace.gmem, assumed_align=4)] * 3
    with TemporaryDirectory() as folder:
        options = (cute.GPUArch("sm_80"), cute.KeepPTX(True), DumpDir(folder))
        return str(cute.compile[options](_launch, *pointers).__ptx__).rstrip("\0")
