"""The kernel: D = alpha * A @ B + beta * C for a result that is symmetric, in CuTe DSL.

Written for Ampere (sm_80): a multistage ``cp.async`` pipeline feeds ``ldmatrix`` and
``mma.sync.m16n8k16`` with float32 accumulators; the result is rounded once. It runs on every later
architecture, without using what those add.

Only this module imports ``cutlass``. Importing it takes a second, so the launcher does so only
when it has to compile.
"""

# No `from __future__ import annotations`: CuTe DSL reads the annotations of a kernel as objects.
from dataclasses import dataclass
from tempfile import TemporaryDirectory

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64
from cutlass.base_dsl.compiler import DumpDir
from cutlass.cute.runtime import make_ptr

from torchtitan_dmuon.optim.symmetric_matmul.cute_sm80.geometry import (
    DEPTH,
    PITCH,
    SHARED_BYTES,
    STAGES,
    THREADS,
    TILE,
    VECTOR,
)

DTYPES = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}


@dataclass(frozen=True)
class Compiled:
    """A kernel as the compiler made it."""

    entry: str
    """Symbol of the kernel in the cubin and in the PTX."""
    cubin: bytes
    ptx: str


def compile_kernel(dtype: str, has_c: bool, arch: str) -> Compiled:
    """Compile the kernel; needs no GPU.

    Args:
        dtype: "float16" or "bfloat16", of A, B, C and D.
        has_c: Whether C is read. Without it ``beta`` is ignored and C may be a null pointer.
        arch: Target as CuTe DSL names it, for example "sm_80".
    """
    pointers = [make_ptr(DTYPES[dtype], 16, cute.AddressSpace.gmem, assumed_align=16)] * 4
    scalars = [Int32(VECTOR), Int32(VECTOR), Float32(1), Float32(1)]
    # The compiler hands over cubin and PTX through files in a folder, and reads them back.
    with TemporaryDirectory(prefix="cute_sm80_") as folder:
        options = (
            cute.GPUArch(arch),
            cute.KeepCUBIN(True),
            cute.KeepPTX(True),
            DumpDir(folder),
        )
        function = cute.compile[options](_launch, *pointers, *scalars, has_c)
    (entry,) = function.kernel_info
    # The PTX ends with a null character.
    return Compiled(entry, function.__cubin__, function.__ptx__.rstrip("\0"))


@cute.jit
def _launch(
    a: cute.Pointer,
    b_transposed: cute.Pointer,
    c: cute.Pointer,
    d: cute.Pointer,
    m: Int32,
    k: Int32,
    alpha: Float32,
    beta: Float32,
    has_c: Constexpr,
) -> None:
    # Compiled for its kernel alone: the package launches that itself, with its own grid.
    _symmetric_matmul(a, b_transposed, c, d, m, k, alpha, beta, has_c).launch(
        grid=[1, 1, 1], block=[THREADS, 1, 1], smem=SHARED_BYTES
    )


@cute.kernel
def _symmetric_matmul(
    a: cute.Pointer,
    b_transposed: cute.Pointer,
    c: cute.Pointer,
    d: cute.Pointer,
    m: Int32,
    k: Int32,
    alpha: Float32,
    beta: Float32,
    has_c: Constexpr,
) -> None:
    """One block makes tile (i, j), j <= i, of one matrix and writes it to (i, j) and (j, i).

    a, b_transposed: (batch, m, k), row-major; c, d: (batch, m, m), row-major; m and k multiples of
    ``VECTOR``, pointers aligned to 16 bytes. Grid: ``geometry.grid``.
    """
    thread, _, _ = cute.arch.thread_idx()
    tile_index, matrix, _ = cute.arch.block_idx()
    i, j = _lower_tile(tile_index)

    # Where a tile starts is counted in 64 bits, the places inside it in 32: there are at most
    # TILE * MAX_EXTENT of them.
    row_a = Int64(matrix) * m + i * TILE
    row_b = Int64(matrix) * m + j * TILE
    operand = cute.make_layout((TILE, k), stride=(cute.assume(k, divby=VECTOR), 1))
    tile_a = cute.make_tensor(a + cute.assume(row_a * k, divby=VECTOR), operand)
    tile_b = cute.make_tensor(b_transposed + cute.assume(row_b * k, divby=VECTOR), operand)
    result = cute.make_layout((TILE, TILE), stride=(cute.assume(m, divby=VECTOR), 1))
    below = cute.assume(row_a * m + j * TILE, divby=VECTOR)
    above = cute.assume(row_b * m + i * TILE, divby=VECTOR)
    tile_c = cute.make_tensor(c + below, result)
    tile_d = cute.make_tensor(d + below, result)
    mirror_d = cute.make_tensor(d + above, result)
    extent = (m - i * TILE, m - j * TILE)

    shared = cute.recast_ptr(
        cutlass.utils.SmemAllocator().allocate(SHARED_BYTES, byte_alignment=1024), dtype=a.dtype
    )
    mma = cute.make_tiled_mma(
        cute.nvgpu.warp.MmaF16BF16Op(a.dtype, Float32, (16, 8, 16)),
        cute.make_layout((2, 2, 1)),
        # 16 columns per warp, so that one ldmatrix.x4 reads B for two mma.
        permutation_mnk=(32, 32, 16),
    )
    accumulator = _product(thread, extent, k, tile_a, tile_b, shared, mma)
    # Another warp may still read the stages that the result tile takes the place of.
    cute.arch.sync_threads()
    scales = (alpha, beta)
    _finish(
        thread, i == j, extent, scales, accumulator, tile_c, tile_d, mirror_d, shared, mma, has_c
    )


@cute.jit
def _lower_tile(index: Int32) -> tuple[Int32, Int32]:
    """Row and column of tile ``index`` of a lower triangle counted row by row.

    Row i starts at number s = i * (i + 1) / 2, and 8 s + 1 = (2 i + 1)^2. Up to ``MAX_EXTENT`` the
    root of a row's first number comes out as 2 i + 1 in float32, whose rounding keeps the order of
    numbers: no root is too small. One near the end of a row may round up into the next.
    """
    root = cute.math.sqrt(Float32(8) * Float32(index) + Float32(1))
    i = Int32((root - Float32(1)) * Float32(0.5))
    if i * (i + 1) // 2 > index:
        i = i - 1
    return i, index - i * (i + 1) // 2


@cute.jit
def _product(
    thread: Int32,
    extent: tuple[Int32, Int32],
    k: Int32,
    tile_a: cute.Tensor,
    tile_b: cute.Tensor,
    shared: cute.Pointer,
    mma: cute.TiledMma,
) -> cute.Tensor:
    """The accumulators of a tile of A @ B: a loop over k through a ring of shared stages.

    The last step of k, the only one that may be incomplete, goes first: it meets the zeros that
    the stages are filled with, and no later copy has to look at k.
    """
    stages = _stages()
    shared_a = cute.make_tensor(shared, stages)
    shared_b = cute.make_tensor(shared + TILE * DEPTH * STAGES, stages)
    loader = _row_copies(_async_copy(tile_a.element_type), DEPTH).get_slice(thread)
    place = loader.partition_S(cute.make_identity_tensor((TILE, DEPTH)))
    from_a = loader.partition_S(cute.local_tile(tile_a, (TILE, DEPTH), (0, None)))
    from_b = loader.partition_S(cute.local_tile(tile_b, (TILE, DEPTH), (0, None)))
    to_a = loader.partition_D(shared_a)
    to_b = loader.partition_D(shared_b)

    # Rows past the matrix are never copied: their stages keep the zeros.
    to_a.fill(0)
    to_b.fill(0)
    # cp.async is not ordered after stores, not even after its own thread's.
    cute.arch.sync_threads()
    num_steps = cute.ceil_div(k, DEPTH)
    left = k - (num_steps - 1) * DEPTH
    _load(from_a, to_a, place, num_steps - 1, 0, extent[0], left)
    _load(from_b, to_b, place, num_steps - 1, 0, extent[1], left)
    cute.arch.cp_async_commit_group()
    for step in cutlass.range_constexpr(1, STAGES - 1):
        if step < num_steps:
            _load(from_a, to_a, place, step - 1, step, extent[0], DEPTH)
            _load(from_b, to_b, place, step - 1, step, extent[1], DEPTH)
        # A group per step, empty or not: the wait below counts groups.
        cute.arch.cp_async_commit_group()

    accumulator = cute.make_rmem_tensor(mma.partition_shape_C((TILE, TILE)), Float32)
    accumulator.fill(0.0)
    for step in cutlass.range(num_steps):
        # STAGES - 1 + step groups are under way; all but the newest STAGES - 2 have landed.
        cute.arch.cp_async_wait_group(STAGES - 2)
        # The barrier shows every thread's copies to all, and tells that all have read the stage
        # of the step before, which the next copies overwrite.
        cute.arch.sync_threads()
        ahead = step + (STAGES - 1)
        if ahead < num_steps:
            _load(from_a, to_a, place, ahead - 1, ahead % STAGES, extent[0], DEPTH)
            _load(from_b, to_b, place, ahead - 1, ahead % STAGES, extent[1], DEPTH)
        cute.arch.cp_async_commit_group()
        _multiply_stage(thread, step % STAGES, shared_a, shared_b, accumulator, mma)
    return accumulator


@cute.jit
def _multiply_stage(
    thread: Int32,
    stage: Int32,
    shared_a: cute.Tensor,
    shared_b: cute.Tensor,
    accumulator: cute.Tensor,
    mma: cute.TiledMma,
) -> None:
    """Add the product of one stage's tiles to the accumulators, 16 columns at a time."""
    thread_mma = mma.get_slice(thread)
    fragment_a = mma.make_fragment_A(thread_mma.partition_A(shared_a)[None, None, None, 0])
    fragment_b = mma.make_fragment_B(thread_mma.partition_B(shared_b)[None, None, None, 0])
    matrices = cute.make_copy_atom(
        cute.nvgpu.warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), shared_a.element_type
    )
    reader_a = cute.make_tiled_copy_A(matrices, mma)
    reader_b = cute.make_tiled_copy_B(matrices, mma)
    source_a = reader_a.get_slice(thread).partition_S(shared_a)
    source_b = reader_b.get_slice(thread).partition_S(shared_b)
    target_a = reader_a.get_slice(thread).retile(fragment_a)
    target_b = reader_b.get_slice(thread).retile(fragment_b)
    for part in cutlass.range_constexpr(DEPTH // 16):
        cute.copy(reader_a, source_a[None, None, part, stage], target_a[None, None, part])
        cute.copy(reader_b, source_b[None, None, part, stage], target_b[None, None, part])
        cute.gemm(
            mma,
            accumulator,
            fragment_a[None, None, part],
            fragment_b[None, None, part],
            accumulator,
        )


@cute.jit
def _load(
    source: cute.Tensor,
    target: cute.Tensor,
    place: cute.Tensor,
    k_tile: Int32,
    stage: Int32,
    num_rows: Int32,
    num_columns: Int32,
) -> None:
    """Start this thread's copies of one operand tile; what lies outside the matrix is not read."""
    atom = _async_copy(source.element_type)
    for r in cutlass.range_constexpr(cute.size(place, mode=[1])):
        row, column = place[0, r, 0]
        if row < num_rows and column < num_columns:
            cute.copy(atom, source[None, r, 0, k_tile], target[None, r, 0, stage])


@cute.jit
def _finish(
    thread: Int32,
    on_diagonal: Boolean,
    extent: tuple[Int32, Int32],
    scales: tuple[Float32, Float32],
    accumulator: cute.Tensor,
    tile_c: cute.Tensor,
    tile_d: cute.Tensor,
    mirror_d: cute.Tensor,
    shared: cute.Pointer,
    mma: cute.TiledMma,
    has_c: Constexpr,
) -> None:
    """Scale, add C, round, and write the tile and its mirror image through shared memory."""
    alpha, beta = scales
    dtype = tile_d.element_type
    tile = cute.make_tensor(shared, cute.make_layout((TILE, TILE), stride=(PITCH, 1)))
    transposed = cute.make_tensor(shared, cute.make_layout((TILE, TILE), stride=(1, PITCH)))
    thread_mma = mma.get_slice(thread)
    own = thread_mma.partition_C(tile)
    mirrored = thread_mma.partition_C(transposed)
    place = thread_mma.partition_C(cute.make_identity_tensor((TILE, TILE)))

    values = alpha * accumulator.load()
    if cutlass.const_expr(has_c):
        _copy_tile(thread, extent, tile_c, tile, True)
        cute.arch.sync_threads()
        added = cute.make_fragment_like(accumulator, dtype)
        cute.autovec_copy(own, added)
        values = values + beta * added.load().to(Float32)
    rounded = cute.make_fragment_like(accumulator, dtype)
    rounded.store(values.to(dtype))

    # A thread puts D's elements where it read C's: no barrier between the two.
    cute.autovec_copy(rounded, own)
    cute.arch.sync_threads()
    if on_diagonal:
        # The lower half replaces the upper one: equal bits on both sides of the diagonal.
        for e in cutlass.range(cute.size(rounded), unroll_full=True):
            if place[e][0] > place[e][1]:
                mirrored[e] = rounded[e]
        cute.arch.sync_threads()
    _copy_tile(thread, extent, tile_d, tile, False)
    if not on_diagonal:
        cute.arch.sync_threads()
        cute.basic_copy(rounded, mirrored)
        cute.arch.sync_threads()
        _copy_tile(thread, (extent[1], extent[0]), mirror_d, tile, False)


@cute.jit
def _copy_tile(
    thread: Int32,
    extent: tuple[Int32, Int32],
    outside: cute.Tensor,
    inside: cute.Tensor,
    to_shared: Constexpr,
) -> None:
    """Copy a result tile between global memory (outside) and shared memory, 16 bytes at a time.

    16 neighbouring threads move one row of 256 bytes. m is a multiple of ``VECTOR``, so that 16
    bytes lie inside the matrix or outside it.
    """
    atom = cute.make_copy_atom(
        cute.nvgpu.CopyUniversalOp(), outside.element_type, num_bits_per_copy=128
    )
    mover = _row_copies(atom, TILE).get_slice(thread)
    far = mover.partition_S(outside)
    near = mover.partition_S(inside)
    place = mover.partition_S(cute.make_identity_tensor((TILE, TILE)))
    for r in cutlass.range_constexpr(cute.size(place, mode=[1])):
        row, column = place[0, r, 0]
        if row < extent[0] and column < extent[1]:
            if cutlass.const_expr(to_shared):
                cute.copy(atom, far[None, r, 0], near[None, r, 0])
            else:
                cute.copy(atom, near[None, r, 0], far[None, r, 0])


def _stages() -> cute.ComposedLayout:
    """Layout (TILE, DEPTH, STAGES) of an operand's ring in shared memory.

    A row is 64 bytes. Exchanging its 16-byte columns by bits of its number puts the eight rows of
    an ldmatrix into different banks.
    """
    rows = cute.make_layout((8, DEPTH), stride=(DEPTH, 1))
    swizzled = cute.make_composed_layout(cute.make_swizzle(2, 3, 3), 0, rows)
    return cute.tile_to_shape(swizzled, (TILE, DEPTH, STAGES), (0, 1, 2))


def _async_copy(dtype: type[cutlass.Numeric]) -> cute.CopyAtom:
    """16 bytes from global to shared memory by cp.async, past the first-level cache."""
    return cute.make_copy_atom(
        cute.nvgpu.cpasync.CopyG2SOp(cute.nvgpu.LoadCacheMode.GLOBAL), dtype, num_bits_per_copy=128
    )


def _row_copies(atom: cute.CopyAtom, width: int) -> cute.TiledCopy:
    """All threads side by side along rows of ``width`` elements, ``VECTOR`` elements each."""
    return cute.make_tiled_copy_tv(
        atom,
        cute.make_ordered_layout((THREADS * VECTOR // width, width // VECTOR), order=(1, 0)),
        cute.make_layout((1, VECTOR)),
    )
