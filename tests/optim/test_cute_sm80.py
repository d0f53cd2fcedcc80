"""The sm_80 kernel, run from its PTX without a GPU, and on one where there is one.

`ptx_interpreter` executes what the compiler made of the kernel, every thread of every block.
"""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.optim.emulated_driver import EmulatedDriver
from tests.optim.ptx_interpreter import Machine
from tests.optim.ptx_memory import GlobalMemory
from tests.optim.ptx_program import parse
from torchtitan_dmuon.optim.symmetric_matmul.cute_sm80 import geometry, launch, objects

try:
    metadata.version(objects.PACKAGE)
    _INSTALLED = True
except metadata.PackageNotFoundError:
    _INSTALLED = False

needs_compiler = pytest.mark.skipif(
    not _INSTALLED, reason=f"{objects.PACKAGE} is not installed: pip install {objects.PACKAGE}"
)

_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_UNIT_ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@functools.cache
def _compiled(dtype: str, has_c: bool, arch: str) -> Any:
    from torchtitan_dmuon.optim.symmetric_matmul.cute_sm80.kernel import compile_kernel

    return compile_kernel(dtype, has_c, arch)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDriver]:
    """Let `launch` take CPU tensors and run its kernels on the interpreter."""
    ptx: dict[bytes, str] = {}
    emulated = EmulatedDriver(ptx)

    def load(dtype: str, has_c: bool, arch: str) -> objects.KernelObject:
        made = _compiled(dtype, has_c, arch)
        ptx[made.cubin] = made.ptx
        return objects.KernelObject(made.entry, made.cubin)

    stream = SimpleNamespace(cuda_stream=77)
    monkeypatch.setattr(launch, "load_or_compile", load)
    monkeypatch.setattr(launch, "unavailable", lambda *_: None)
    monkeypatch.setattr(launch, "_driver", lambda: emulated)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    launch._function.cache_clear()
    yield emulated
    launch._function.cache_clear()


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def _symmetric(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    x = _random(shape, torch.float32, seed)
    return (x + x.mT).to(dtype)


def _assert_rounded_once(
    result: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None,
    alpha: float,
    beta: float,
) -> None:
    """The result's lower half is within one rounding of a float32 sum, its upper half the same."""
    a, b = a.double().cpu(), b.double().cpu()
    added = torch.zeros(()) if c is None else c.double().cpu()
    exact = alpha * (a @ b) + beta * added
    terms = abs(alpha) * (a.abs() @ b.abs()) + abs(beta) * added.abs()
    # One rounding for each of k additions, for alpha and beta, and for their sum; then the result.
    sums = (a.size(-1) + 4) * 2.0**-24 * terms
    limit = _UNIT_ROUNDOFF[result.dtype] * exact.abs() + 1.01 * sums + 2.0**-24
    error = (result.double().cpu() - exact).abs()
    assert torch.all((error <= limit).tril() == torch.ones_like(error).tril().bool())
    torch.testing.assert_close(result, result.mT, rtol=0, atol=0)


# m: one tile in part, whole tiles, three tiles in part. k: less than a stage, whole stages, more
# stages than the ring holds with the last one in part.
_CASES = [
    ("bfloat16", True, (2,), 264, 168),
    ("float16", False, (), 8, 8),
    ("float16", False, (3,), 136, 24),
    pytest.param("float16", False, (), 384, 128, marks=pytest.mark.long),
    pytest.param("bfloat16", True, (), 512, 264, marks=pytest.mark.long),
    pytest.param("bfloat16", False, (2,), 264, 168, marks=pytest.mark.long),
    pytest.param("bfloat16", False, (), 120, 64, marks=pytest.mark.long),
    pytest.param("float16", True, (2,), 264, 168, marks=pytest.mark.long),
    pytest.param("float16", True, (), 640, 32, marks=pytest.mark.long),
]


@needs_compiler
@pytest.mark.parametrize(("dtype", "has_c", "batch", "m", "k"), _CASES)
def test_gram_is_rounded_once_and_exactly_symmetric(
    driver: EmulatedDriver, dtype: str, has_c: bool, batch: tuple[int, ...], m: int, k: int
) -> None:
    """alpha X X^T + beta C: right in every element, each stored once, nothing else touched."""
    x = _random((*batch, m, k), _TYPES[dtype], seed=m)
    c = _symmetric((*batch, m, m), _TYPES[dtype], seed=k) if has_c else None
    result = launch.symmetric_matmul(x, x.mT, c, 0.75, -1.5)
    assert result.shape == (*batch, m, m) and result.dtype == x.dtype
    _assert_rounded_once(result, x, x.mT, c, 0.75, -1.5)
    assert driver.streams == [77]


@needs_compiler
def test_product_of_commuting_matrices_reads_rows_of_b(driver: EmulatedDriver) -> None:
    """S (S S), neither a view of the other: b's rows serve as its columns, without a copy."""
    s = _symmetric((136, 136), torch.bfloat16, seed=1) / 8
    square = (s.float() @ s.float()).bfloat16()
    square = (square.tril() + square.tril(-1).mT).contiguous()
    c = _symmetric((136, 136), torch.bfloat16, seed=2)
    result = launch.symmetric_matmul(s, square, c, 2.0, 1.0)
    _assert_rounded_once(result, s, square, c, 2.0, 1.0)


@needs_compiler
def test_tall_matrix_is_transposed_first(driver: EmulatedDriver) -> None:
    """X^T X of a tall X, square included: a is X's transposed view, b is X."""
    for shape in ((40, 136), (136, 136)):
        x = _random(shape, torch.float16, seed=3)
        result = launch.symmetric_matmul(x.mT, x)
        _assert_rounded_once(result, x.mT, x, None, 1.0, 1.0)


@needs_compiler
def test_nan_and_infinity_are_not_hidden(driver: EmulatedDriver) -> None:
    """A NaN in one row spoils that row and column and no more; so does an infinity."""
    x = _random((136, 24), torch.float16, seed=4)
    x[130, 23] = torch.nan
    x[5, 0] = torch.inf
    result = launch.symmetric_matmul(x, x.mT)
    expected = x.float() @ x.float().mT
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.isinf(), expected.isinf())


@needs_compiler
def test_kernel_is_loaded_once_per_dtype(driver: EmulatedDriver) -> None:
    """The second call of a dtype reuses the loaded kernel, whatever the shape."""
    for m in (8, 16, 24):
        x = _random((m, 8), torch.float16, seed=m)
        launch.symmetric_matmul(x, x.mT)
    assert driver.loads == 1


@needs_compiler
def test_offsets_of_a_large_batch_do_not_wrap(driver: EmulatedDriver) -> None:
    """Matrix 65535 of a batch starts beyond 2^32 elements; its block reads and writes there."""
    m, k, matrix = 264, 168, geometry.MAX_BATCH
    made = _compiled("bfloat16", True, "sm_80")
    memory = GlobalMemory()
    x = _random((m, k), torch.bfloat16, seed=5)
    c = _symmetric((m, m), torch.bfloat16, seed=6)
    d = torch.zeros_like(c)
    at_x, at_c, at_d = (
        memory.allocate(t.view(torch.uint16).numpy(), writable=t is d) for t in (x, c, d)
    )
    base_x, base_c, base_d = (
        at - 2 * matrix * size for at, size in ((at_x, m * k), (at_c, m * m), (at_d, m * m))
    )
    blocks = [(tile, matrix) for tile in range(geometry.grid(m, 1)[0])]
    arguments = [base_x, base_x, base_c, base_d, m, k, 1.0, 1.0]
    Machine(parse(made.ptx), arguments, memory, blocks, geometry.SHARED_BYTES).run()
    _assert_rounded_once(d, x, x.mT, c, 1.0, 1.0)


@needs_compiler
def test_tile_numbers_decode_exactly() -> None:
    """First and last tile of every row, up to the largest matrix: the float root misleads none.

    The decoding never falls as the number rises, so that these two cover the rows.
    """
    from tests.optim.cute_probe import THREADS, decoder_ptx

    rows = np.arange(geometry.MAX_EXTENT // geometry.TILE, dtype=np.int64)
    first = rows * (rows + 1) // 2
    numbers = np.concatenate([first, first + rows]).astype(np.int32)
    assert geometry.grid(geometry.MAX_EXTENT, 1)[0] == numbers[-1] + 1 == numbers.max() + 1
    memory = GlobalMemory()
    found = np.zeros((2, numbers.size), np.int32)
    addresses = [
        memory.allocate(numbers.view(np.uint16)),
        *(memory.allocate(row.view(np.uint16), writable=True) for row in found),
    ]
    blocks = [(x, 0) for x in range(numbers.size // THREADS)]
    ptx = decoder_ptx()
    assert "sqrt.rn.f32" in ptx, "an approximate root can be too small, which nothing mends"
    Machine(parse(ptx), addresses, memory, blocks, 0).run()
    np.testing.assert_array_equal(found[0], np.concatenate([rows, rows]))
    np.testing.assert_array_equal(found[1], np.concatenate([0 * rows, rows]))


_BARRIER = r"\tbar\.sync \t0;\n"
_WAIT = r"\tcp\.async\.wait_group \t2;\n"


def _run_small(ptx: str) -> Machine:
    """Two tiles by two, six steps of k: every barrier of the kernel is passed."""
    m, k = 136, 168
    memory = GlobalMemory()
    x = memory.allocate(np.zeros(m * k, np.uint16))
    d = memory.allocate(np.zeros(m * m, np.uint16), writable=True)
    arguments = [x, x, 0, d, m, k, 1.0, 1.0]
    blocks = [(0, 0), (1, 0), (2, 0)]
    machine = Machine(parse(ptx), arguments, memory, blocks, geometry.SHARED_BYTES)
    machine.run()
    return machine


@needs_compiler
def test_operands_are_read_without_bank_conflicts() -> None:
    """The eight rows of every ldmatrix lie in different banks."""
    assert _run_small(_compiled("float16", False, "sm_80").ptx).bank_conflicts == 0


@needs_compiler
@pytest.mark.parametrize(
    ("pattern", "occurrence", "replacement"),
    [
        (_WAIT, 0, ""),
        (_WAIT, 0, "\tcp.async.wait_group 3;\n"),
        (_BARRIER, 1, ""),
        *(pytest.param(_BARRIER, n, "", marks=pytest.mark.long) for n in (0, 2, 3, 4, 5, 6)),
    ],
)
def test_every_wait_and_barrier_is_needed(pattern: str, occurrence: int, replacement: str) -> None:
    """Without any one of them, or with a looser wait, the interpreter finds a race."""
    ptx = _compiled("float16", False, "sm_80").ptx
    assert len(re.findall(_BARRIER, ptx)) == 7 and len(re.findall(_WAIT, ptx)) == 1
    place = list(re.finditer(pattern, ptx))[occurrence]
    with pytest.raises(AssertionError, match="shared"):
        _run_small(ptx[: place.start()] + replacement + ptx[place.end() :])


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "has_c"),
    [
        ("bfloat16", True),
        ("float16", False),
        pytest.param("bfloat16", False, marks=pytest.mark.long),
        pytest.param("float16", True, marks=pytest.mark.long),
    ],
)
def test_assembler_finds_ampere_instructions_and_no_spills(
    dtype: str, has_c: bool, tmp_path: Path
) -> None:
    """The kernel is cp.async, ldmatrix and mma.sync, in registers alone; two blocks fit sm_80."""
    ptx = _compiled(dtype, has_c, "sm_80").ptx
    kind = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    assert f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32" in ptx
    assert "cp.async.cg.shared.global" in ptx
    assert "ldmatrix.sync.aligned.m8n8.x4.shared.b16" in ptx
    assert ".local" not in ptx
    report = _assemble(ptx, tmp_path)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report
    (registers,) = re.findall(r"Used (\d+) registers", report)
    assert 2 * geometry.THREADS * int(registers) <= 65536
    assert 2 * (geometry.SHARED_BYTES + 1024) <= 164 * 1024


def _assemble(ptx: str, folder: Path) -> str:
    """What ptxas says about the PTX for sm_80; skips where no ptxas is recent enough."""
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    candidates = [shutil.which("ptxas")]
    triton = find_spec("triton")
    if triton is not None and triton.origin is not None:
        tools = Path(triton.origin).parent / "backends" / "nvidia" / "bin"
        candidates += [str(tools / name) for name in ("ptxas-blackwell", "ptxas")]
    reports = ["no ptxas was found"]
    for ptxas in candidates:
        if ptxas is None or not Path(ptxas).exists():
            continue
        command = [ptxas, "-v", "-arch=sm_80", str(source), "-o", str(folder / "kernel.cubin")]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        if done.returncode == 0:
            return done.stdout + done.stderr
        reports.append(done.stderr)
        if "Unsupported .version" not in done.stderr:
            pytest.fail(f"ptxas refuses the kernel: {done.stderr}")
    pytest.skip(f"needs a ptxas that knows the compiler's PTX: {reports[-1]}")


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_86", "sm_90", "sm_100"])
def test_compiles_for_later_architectures(arch: str) -> None:
    """Without a GPU, for what comes after sm_80, to the same instructions."""
    made = _compiled("bfloat16", True, arch)
    assert f".target {arch}" in made.ptx and "mma.sync" in made.ptx
    assert made.cubin[:4] == b"\x7fELF" and made.entry.encode() in made.cubin


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", _TYPES.values(), ids=_TYPES)
@pytest.mark.parametrize("shape", [(8, 8), (264, 168), (4, 520, 1032), (2048, 2048)])
def test_on_a_gpu(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The same bounds on the device, and again from a captured graph with new operands."""
    x = _random(shape, dtype, seed=7).cuda()
    c = _symmetric((*shape[:-1], shape[-2]), dtype, seed=8).cuda()
    reason = launch.unavailable(x.device, dtype, (x[..., 0, 0].numel(), *shape[-2:]))
    if reason is not None:
        pytest.skip(reason)
    _assert_rounded_once(launch.symmetric_matmul(x, x.mT, c, 0.75, -1.5), x, x.mT, c, 0.75, -1.5)
    _assert_rounded_once(launch.symmetric_matmul(x, x.mT), x, x.mT, None, 1.0, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = launch.symmetric_matmul(x, x.mT, c, 0.75, -1.5)
    x.copy_(_random(shape, dtype, seed=9))
    graph.replay()
    torch.cuda.synchronize()
    _assert_rounded_once(result, x, x.mT, c, 0.75, -1.5)
