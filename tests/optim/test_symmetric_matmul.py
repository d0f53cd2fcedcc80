"""Symmetric products: every backend computes them, and the adapters call what they adapt."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan_dmuon.optim import symmetric_matmul as package
from torchtitan_dmuon.optim.symmetric_matmul import cute, matmul, quack, selection, symmetric_matmul
from torchtitan_dmuon.optim.symmetric_matmul.backend import Backend, Problem
from torchtitan_dmuon.optim.symmetric_matmul.check import ALPHA, BETA, Operands, Reference

CPU = torch.device("cpu")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path) -> Iterator[None]:
    """Choices of a test stay with it. One thread: small products wait for busy cores otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    package.configure(folder=tmp_path / "choices")
    yield
    package.configure(folder=None)
    torch.set_num_threads(threads)


def backends_for(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> Any:
    return [b for b in package.backends() if b.unavailable(device, dtype, shape) is None]


def assert_right(result: torch.Tensor, problem: Problem, operands: Operands) -> None:
    """Every element is the exact product, within its summation and one rounding."""
    a, b, c = (None if x is None else x.double() for x in (operands.a, operands.b, operands.c))
    assert a is not None and b is not None
    exact, size = ALPHA * (a @ b), abs(ALPHA) * (a.abs() @ b.abs())
    if c is not None:
        exact, size = exact + BETA * c, size + abs(BETA) * c.abs()
    summed = torch.float64 if problem.dtype == torch.float64 else torch.float32
    bound = torch.finfo(problem.dtype).eps * exact.abs() + 16 * torch.finfo(summed).eps * size
    bound += torch.finfo(problem.dtype).tiny
    assert result.dtype == problem.dtype and result.is_contiguous()
    assert torch.all((result.double() - exact).abs() <= bound)


@each_dtype
@pytest.mark.parametrize("batch", [None, 3])
def test_every_cpu_backend_is_right(dtype: torch.dtype, batch: int | None) -> None:
    """Rows that no number of panels divides, views of all layouts, with and without c."""
    for m, k in ((150, 37), (145, 145)):
        for layouts, with_c in itertools.product(("rc", "cr", "rr", "sc", "ss"), (False, True)):
            kind = "gram" if layouts in ("rc", "cr") else "product"
            problem = Problem(kind, with_c, batch, m, k, m, dtype, layouts)  # type: ignore[arg-type]
            operands = Operands(problem, CPU)
            seen = Problem.of(operands.a, operands.b, operands.c, symmetric=True)
            assert seen == problem  # The data are what the problem says.
            backends = backends_for(CPU, dtype, problem.shape)
            assert len(backends) == (6 if dtype in DTYPES[:2] else 3)
            for backend in backends:
                result = backend(operands.a, operands.b, operands.c, ALPHA, BETA)
                assert_right(result, problem, operands)


@pytest.mark.parametrize(
    "backend", backends_for(CPU, torch.float16, (1, 160, 20)), ids=lambda b: b.name
)
def test_nan_and_infinity_are_where_the_plain_product_has_them(backend: Backend) -> None:
    """A mirrored triangle hides nothing: a gradient gone wrong must be seen by its owner."""
    plain = package.backends()[0]
    zero = torch.zeros(160, 20, dtype=torch.float16)
    for row, value in itertools.product((0, 77, 159), (float("nan"), float("inf"))):
        a = zero.clone()
        a[row, 3] = value
        for c in (None, torch.zeros(160, 160, dtype=torch.float16)):
            expected = plain(a, a.mT, c, 1.0, 1.0)
            assert torch.equal(backend(a, a.mT, c, 1.0, 1.0), expected) or torch.equal(
                backend(a, a.mT, c, 1.0, 1.0).isnan(), expected.isnan()
            )
        c = torch.zeros(160, 160, dtype=torch.float16)
        c[row, 5] = c[5, row] = value
        result = backend(zero, zero.mT, c, 1.0, 1.0)
        assert not result[row, 5].isfinite() and not result[5, row].isfinite()
        assert int(result.isfinite().logical_not().sum()) == (1 if row == 5 else 2)
    assert torch.equal(backend(zero, zero.mT, None, 2.0, 1.0), plain(zero, zero.mT, None, 2.0, 1.0))


def circulant(size: int, seed: int) -> torch.Tensor:
    """Return a symmetric matrix of small integers that commutes with all others of its size."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.zeros(size, dtype=torch.float64)
    places = torch.randint(size, (4,), generator=generator)
    first[places] = first[-places] = 1.0 + seed
    return torch.stack([first.roll(i) for i in range(size)])


@each_dtype
def test_products_of_commuting_matrices_are_exact(dtype: torch.dtype) -> None:
    """Three different matrices, whose exact result every dtype can hold."""
    a, b, c = (circulant(150, seed) for seed in range(3))
    exact = 0.5 * a @ b - 2 * c
    assert torch.equal(exact, exact.mT) and not torch.equal(a, b)
    a, b, c = (x.to(dtype).expand(2, -1, -1) for x in (a, b, c))
    for backend in backends_for(CPU, dtype, (2, 150, 150)):
        assert torch.equal(backend(a, b, c, 0.5, -2.0), exact.to(dtype).expand(2, -1, -1))
        assert torch.equal(backend(a[0], b[0], c[0], 0.5, -2.0), exact.to(dtype))


@pytest.mark.parametrize(
    "backend", backends_for(CPU, torch.float16, (1, 300, 300)), ids=lambda b: b.name
)
def test_without_c_the_product_is_scaled_before_it_is_rounded(backend: Backend) -> None:
    """One rounding: alpha is not applied to a product that is already rounded, or overflowed."""
    a = torch.full((300, 300), 64.0, dtype=torch.float16)
    assert torch.all(backend(a, a.mT, None, 2.0**-10, 1.0) == 300 * 4.0)


def test_a_chosen_backend_is_called_and_counted() -> None:
    """The counters show what ran: a fast kernel that is chosen but never called is found out."""
    a = torch.randn(256, 40)
    result = symmetric_matmul(a, a.mT)
    (choice,) = package.selector().choices(CPU).values()
    assert package.calls() == {choice.backend: 1}
    symmetric_matmul(a, a.mT)
    assert package.calls() == {choice.backend: 2}
    torch.testing.assert_close(result, a @ a.mT)


def test_a_later_process_reads_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured twice on one kind of machine."""
    a = torch.randn(2, 256, 24)
    symmetric_matmul(a, a.mT, torch.eye(256).expand(2, -1, -1), beta=0.5)
    before = package.selector().choices(CPU)
    package.configure(folder=tmp_path / "choices")
    monkeypatch.setattr(selection, "measure", None)
    symmetric_matmul(a, a.mT, torch.eye(256).expand(2, -1, -1), beta=0.5)
    assert package.selector().choices(CPU) == before and len(before) == 1


def test_small_matrices_are_never_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below 256 rows nothing can matter: no time is spent, no file written."""
    monkeypatch.setattr(selection, "measure", None)
    for a in (torch.randn(255, 400), torch.randn(1, 1), torch.randn(4, 30, 10), torch.ones(0, 3)):
        torch.testing.assert_close(symmetric_matmul(a, a.mT), a @ a.mT)
    empty = torch.ones(300, 0)
    assert torch.equal(symmetric_matmul(empty, empty.mT), torch.zeros(300, 300))
    assert set(package.calls()) == {"plain"} and not (tmp_path / "choices").exists()


def test_any_product_is_not_given_to_a_backend_for_symmetric_ones() -> None:
    """`matmul` takes what `symmetric_matmul` does, and mirrors nothing."""
    a, b = torch.randn(256, 256).bfloat16(), torch.randn(256, 300).bfloat16()
    c = torch.randn(256, 300).bfloat16()
    result = matmul(a, b, c, alpha=0.5, beta=-2.0)
    expected = 0.5 * a.double() @ b.double() - 2 * c.double()
    assert float((result.double() - expected).norm() / expected.norm()) < 4e-3
    (choice,) = package.selector().choices(CPU).values()
    assert choice.backend in ("plain", "through_float32")
    assert not {name for name in {**choice.seconds, **choice.dropped} if "panels" in name}
    assert package.calls() == {}


def test_wrong_operands_are_refused_in_words() -> None:
    """Each mistake names the operand, what was expected and what was given."""
    a = torch.randn(8, 4)
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((a, a), r"b: expected \(4, 8\) for a of \(8, 4\), got \(8, 4\)"),
        ((a, a.mT, a), r"c: expected \(8, 8\) for a of \(8, 4\), got \(8, 4\)"),
        ((a, a.mT[None]), r"b: expected \(4, 8\)"),
        ((a, a.mT.double()), "b: expected torch.float32 on cpu as a is, got torch.float64"),
        ((a[0], a[0]), r"a: expected \(m, k\) or \(batch, m, k\), got \(4,\)"),
        ((a.long(), a.mT.long()), "a: expected float16, bfloat16, float32 or float64, got"),
        ((a.requires_grad_(), a.mT), "not differentiable"),
    ]
    for operands, message in cases:
        with pytest.raises(ValueError, match=message):
            symmetric_matmul(*operands)
    with pytest.raises(ValueError, match=r"c: expected \(8, 3\)"):
        matmul(a.detach(), torch.ones(4, 3), torch.ones(3))
    with torch.no_grad():
        assert symmetric_matmul(a, a.mT).shape == (8, 8)


def test_the_error_of_a_row_is_measured_by_all_its_elements() -> None:
    """One wrong element of a hundred thousand is seen, with its size."""
    problem = Problem("gram", False, 2, 300, 200, 300, torch.float64, "rc")
    operands = Operands(problem, CPU)
    reference = Reference(operands)
    result = ALPHA * operands.a @ operands.b
    assert reference.error(result) < 1e-13
    norm = result[1, 250].norm()
    result[1, 250, 7] += 0.01 * norm
    assert 0.005 < reference.error(result) < 0.02
    result[0, 0, 0] = float("nan")
    assert reference.error(result) == float("inf")


class FakeGPU:
    """What adapters ask of torch about a GPU, and QuACK's module, which records its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
        self.calls: list[dict[str, Any]] = []
        module = types.ModuleType("quack.gemm_interface")
        module.gemm_symmetric = self._gemm_symmetric  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "quack", types.ModuleType("quack"))
        monkeypatch.setitem(sys.modules, "quack.gemm_interface", module)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(quack.metadata, "version", lambda name: "0.6.5")
        quack._load.cache_clear()

    def _gemm_symmetric(self, A: Any, B: Any, C: Any = None, **rest: Any) -> Any:
        self.calls.append({"A": A, "B": B, "C": C, **rest})
        return rest["alpha"] * A @ B + (0 if C is None else rest["beta"] * C)


@pytest.fixture
def clean_quack() -> Iterator[None]:
    quack._load.cache_clear()
    yield
    quack._load.cache_clear()


@pytest.mark.usefixtures("clean_quack")
def test_quack_is_on_only_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its limits is a reason in words, and nothing is imported before they are met."""
    backend, cuda, half = quack.Quack(), torch.device("cuda", 0), torch.float16
    assert backend.unavailable(CPU, half, (1, 512, 512)) == "for CUDA GPUs only"
    assert backend.broken() is None  # Not installed is not broken.
    FakeGPU(monkeypatch, (8, 0))
    reason = backend.unavailable(cuda, half, (1, 512, 512))
    assert reason == "needs a GPU of capability 9.0 or newer, this one has 8.0"
    FakeGPU(monkeypatch, (9, 0))
    assert backend.unavailable(cuda, half, (1, 512, 512)) is None
    assert backend.unavailable(cuda, torch.bfloat16, (60, 256, 2048)) is None
    assert backend.unavailable(cuda, torch.float32, (1, 512, 512)) is not None
    for m, k in ((252, 512), (516, 512), (512, 255), (512, 516)):
        assert "that 8 divides" in str(backend.unavailable(cuda, half, (1, m, k)))
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", None)
    quack._load.cache_clear()
    broken = "quack-kernels 0.6.5 fails to import: ModuleNotFoundError"
    assert str(backend.unavailable(cuda, half, (1, 512, 512))).startswith(broken)
    assert str(backend.broken()).startswith(broken)


@pytest.mark.usefixtures("clean_quack")
def test_quack_gets_what_it_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aligned operands as they are, others as aligned copies; factors as floats."""
    gpu, backend = FakeGPU(monkeypatch, (9, 0)), quack.Quack()
    x = torch.randn(64, 48, dtype=torch.float64)
    for a in (x, x.mT.contiguous().mT):
        backend(a, a.mT, None, 2, 1)
        assert gpu.calls[-1]["A"] is a and gpu.calls[-1]["C"] is None
        assert isinstance(gpu.calls[-1]["alpha"], float) and gpu.calls[-1]["alpha"] == 2.0
    for a in (x[:, 1:], torch.randn(64, 47, dtype=torch.float64), x[:, ::2], x[:, 1:-1]):
        c = torch.randn(65, 65, dtype=torch.float64)[1:, 1:]
        result = backend(a, a.mT, c, 0.5, -1.0)
        for name in ("A", "B", "C"):
            given = gpu.calls[-1][name]
            assert given.data_ptr() % 16 == 0 and 1 in given.stride()
            assert max(given.stride()) * 8 % 16 == 0 or given.is_contiguous()
        torch.testing.assert_close(result, 0.5 * a @ a.mT - c)


def test_the_own_kernel_is_asked_and_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasons and results are those of `cute_sm80`."""
    backend = cute.CuteSm80()
    assert backend.unavailable(CPU, torch.float16, (1, 512, 512)) == "for CUDA GPUs only"
    calls: list[Any] = []
    monkeypatch.setattr(
        cute.cute_sm80, "symmetric_matmul", lambda *x: calls.append(x) or torch.ones(1)
    )
    a = torch.randn(8, 8)
    assert torch.equal(backend(a, a.mT, a, 0.5, 2.0), torch.ones(1))
    assert calls[0][0] is a and calls[0][2:] == (a, 0.5, 2.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=lambda d: str(d)[6:])
def test_every_gpu_backend_is_right(dtype: torch.dtype) -> None:
    """Plain, panels, QuACK and the own kernel where they are on, against float64."""
    cuda = torch.device("cuda", 0)
    for batch, m, k in ((None, 512, 2048), (None, 1000, 264), (3, 264, 264)):
        for kind, layouts, with_c in (
            ("gram", "rc", False),
            ("gram", "cr", True),
            ("product", "rr", True),
        ):
            inner = m if kind == "product" else k
            problem = Problem(kind, with_c, batch, m, inner, m, dtype, layouts)  # type: ignore[arg-type]
            operands = Operands(problem, cuda)
            reference = Reference(operands)
            plain, *others = backends_for(cuda, dtype, problem.shape)
            limit = 4 * reference.error(plain(operands.a, operands.b, operands.c, ALPHA, BETA))
            for backend in others:
                result = backend(operands.a, operands.b, operands.c, ALPHA, BETA)
                assert reference.error(result) <= limit, (backend.name, problem.key)


@pytest.mark.gpu
def test_on_a_gpu_a_choice_is_made_before_a_graph_and_used_in_it() -> None:
    """The first call measures; inside a capture a new shape is an error, a known one replays."""
    a = torch.randn(512, 1024, device="cuda", dtype=torch.float16)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="first time while a CUDA graph"),
        torch.cuda.graph(graph),
    ):
        symmetric_matmul(a, a.mT)
    expected = symmetric_matmul(a, a.mT)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = symmetric_matmul(a, a.mT)
    graph.replay()
    assert torch.equal(result, expected)
    (choice,) = package.selector().choices(torch.device("cuda", 0)).values()
    assert set(choice.seconds) | set(choice.dropped) == {
        b.name for b in backends_for(torch.device("cuda", 0), a.dtype, (1, 512, 1024))
    }
