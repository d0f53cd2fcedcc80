"""Newton-Schulz against the exact polar factor, torch.optim.Muon and the public reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.optim import _muon as torch_muon

from tests.runtime.reference import distance
from tests.runtime.reference import newton_schulz as textbook
from torchtitan_dmuon.optim.newton_schulz import (
    BAND,
    BAND_FLOOR,
    GRAM_MARGIN,
    POLAR_EXPRESS,
    QUINTIC,
    default_dtype,
    default_restarts,
    flops,
    newton_schulz,
    per_step,
    uses_gram,
)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SHAPES = [(48, 32), (32, 48), (64, 64), (16, 200), (200, 16), (1, 40), (40, 1), (7, 5), (1, 1)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
each_method = pytest.mark.parametrize("method", ["gram", "standard"])

# How far rounding moves a singular value, by dtype; measured 1.1e-5, 0.034 and 0.047 at worst.
SLACK = {F64: 1e-9, F32: 5e-5, F16: 0.05, BF16: 0.07}


def _gradient(shape: tuple[int, ...]) -> torch.Tensor:
    """Full rank, and well enough conditioned that precision is all that differs."""
    torch.manual_seed(sum(shape))
    rows, columns = shape[-2:]
    return torch.randn(*shape[:-2], 512, rows).mT @ torch.randn(*shape[:-2], 512, columns)


def _spectra(m: int) -> dict[str, torch.Tensor]:
    """Singular values of a zoo of matrices, largest first."""
    return {
        "equal": torch.ones(m, dtype=F64),
        "linear": torch.linspace(1, 0.1, m, dtype=F64),
        "geometric to 1e-2": torch.logspace(0, -2, m, dtype=F64),
        "geometric to 1e-4": torch.logspace(0, -4, m, dtype=F64),
        "one large": torch.cat([torch.ones(1), torch.full((m - 1,), 1e-2)]).double(),
        "one small": torch.cat([torch.ones(m - 1), torch.full((1,), 1e-2)]).double(),
        "half the rank": torch.cat([torch.ones(m - m // 2), torch.zeros(m // 2)]).double(),
    }


def _with_spectrum(
    shape: tuple[int, int], values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a matrix in float64 with these singular values, and its singular vectors U and V."""
    generator = torch.Generator().manual_seed(sum(shape))
    m = min(shape)
    u, _ = torch.linalg.qr(torch.randn(shape[0], m, dtype=F64, generator=generator))
    v, _ = torch.linalg.qr(torch.randn(shape[1], m, dtype=F64, generator=generator))
    return u @ torch.diag(values) @ v.T, u, v


def _scalar(values: torch.Tensor) -> torch.Tensor:
    """The iteration on singular values alone: what exact arithmetic gives."""
    for a, b, c in POLAR_EXPRESS:
        values = values * (a + b * values**2 + c * values**4)
    return values


def test_the_published_band_is_that_of_the_coefficients() -> None:
    """Every singular value from BAND_FLOOR to 1 ends in BAND, and no wider band is claimed."""
    values = _scalar(torch.logspace(math.log10(BAND_FLOOR), 0, 100_001, dtype=F64))
    assert BAND[0] <= values.min() < BAND[0] + 1e-3
    assert BAND[1] - 1e-3 < values.max() <= BAND[1]
    assert _scalar(torch.tensor([BAND_FLOOR / 10], dtype=F64)) < BAND[0]


@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16], ids=str)
@pytest.mark.parametrize("shape", [(96, 96), (48, 192), (192, 48), (64, 72)], ids=str)
@each_method
def test_the_zoo_ends_in_the_band_and_aligned_with_the_polar_factor(
    shape: tuple[int, int], method: Any, dtype: torch.dtype
) -> None:
    """In the basis of the exact polar factor the result is diagonal, each entry where exact
    arithmetic puts it: no direction turns, none leaves the band."""
    for name, spectrum in _spectra(min(shape)).items():
        matrix, u, v = _with_spectrum(shape, spectrum)
        result = newton_schulz(matrix, dtype=dtype, method=method)
        assert result.dtype == dtype and result.shape == shape
        inside = u.T @ result.double() @ v
        start = spectrum / spectrum.norm()
        found, kept = inside.diagonal(), start >= BAND_FLOOR
        slack = SLACK[dtype]
        assert ((found - _scalar(start))[kept]).abs().max() <= slack, name
        assert found[kept].min() >= BAND[0] - slack and found.max() <= BAND[1] + slack, name
        values = torch.linalg.svdvals(result.double())
        assert values.max() <= BAND[1] + slack, name
        # The polar factor is U V^T: what is kept points along it.
        cosine = found[kept].sum() / (inside[kept].norm() * math.sqrt(int(kept.sum())))
        assert cosine >= 0.98, name


@each_method
@each_shape
def test_fp32_is_the_textbook(shape: tuple[int, int], method: Any) -> None:
    matrix = _gradient(shape)
    result = newton_schulz(matrix, dtype=F32, method=method)
    assert result.shape == shape and result.dtype == F32
    assert distance(result, textbook(matrix.double())) <= 1e-4


@each_method
@each_shape
def test_fp64_is_the_textbook_exactly(shape: tuple[int, int], method: Any) -> None:
    """In its own precision nothing is left: both methods are the same iteration."""
    matrix = _gradient(shape).double()
    assert distance(newton_schulz(matrix, dtype=F64, method=method), textbook(matrix)) <= 1e-10
    quintic = newton_schulz(matrix, dtype=F64, method=method, coefficients="quintic")
    assert distance(quintic, textbook(matrix, quintic=True)) <= 1e-10


@each_method
@each_shape
def test_fp32_is_torch_muon_in_fp32(
    shape: tuple[int, int], method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own function, kept from rounding to bfloat16: the same numbers but for rounding."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.float().clone())
    matrix = _gradient(shape)
    peer = torch_muon._zeropower_via_newtonschulz(matrix, QUINTIC, 5, 1e-7)
    assert peer.dtype == F32
    result = newton_schulz(matrix, dtype=F32, coefficients="quintic", method=method)
    assert distance(result, peer) <= 1e-4


@each_shape
def test_bf16_is_as_near_the_exact_result_as_torch_muon(shape: tuple[int, int]) -> None:
    """Both round every product to bfloat16, torch the norm as well."""
    matrix = _gradient(shape)
    peer = torch_muon._zeropower_via_newtonschulz(matrix, QUINTIC, 5, 1e-7)
    result = newton_schulz(matrix, dtype=BF16, coefficients="quintic", method="standard")
    exact = textbook(matrix.double(), quintic=True)
    error = max(distance(peer, exact), 2**-8)
    assert result.dtype == BF16 and error <= 0.03
    assert distance(result, exact) <= 1.5 * error


@pytest.mark.parametrize("kind", ["gram", "standard"])
@pytest.mark.parametrize("shape", [(48, 200), (200, 48), (64, 96), (1, 40), (32, 48)], ids=str)
def test_the_mixed_precision_flow_is_that_of_the_public_reference(
    shape: tuple[int, int], kind: Any
) -> None:
    """Against the package gram-newton-schulz, whose float16 flow runs on CPUs without kernels."""
    oracle = pytest.importorskip("gram_newton_schulz")
    gram = oracle.GramNewtonSchulz(
        ns_use_kernels=False, compile_kwargs=None, use_gram_newton_schulz=kind == "gram"
    )
    matrix = _gradient(shape)
    expected = gram(matrix)
    result = newton_schulz(matrix, dtype=F16, method=kind, eps=1e-7)
    exact = newton_schulz(matrix.double(), dtype=F64, method=kind)
    # As far apart as two float16 computations of the same may be: each is off the exact result.
    error = distance(expected, exact)
    assert distance(result, expected) <= 2 * error
    assert distance(result, exact) <= 1.5 * error
    assert error <= 0.02, "the oracle does something else"


def test_coefficients_and_restart_are_those_of_the_public_reference() -> None:
    coefficients = pytest.importorskip("gram_newton_schulz.coefficients")
    assert torch.tensor(coefficients.POLAR_EXPRESS_COEFFICIENTS).equal(torch.tensor(POLAR_EXPRESS))
    oracle = pytest.importorskip("gram_newton_schulz").GramNewtonSchulz(
        ns_use_kernels=False, compile_kwargs=None
    )
    assert tuple(oracle.gram_newton_schulz_reset_iterations) == default_restarts(F16)


def test_bf16_needs_a_second_restart() -> None:
    """With the reference's one restart, meant for float16, bfloat16 leaves the band by far."""
    matrix, _, _ = _with_spectrum((96, 128), _spectra(96)["geometric to 1e-4"])
    once = newton_schulz(matrix, dtype=BF16, method="gram", restarts=(2,)).double()
    assert torch.linalg.svdvals(once).max() > BAND[1] + 2 * SLACK[BF16]
    twice = newton_schulz(matrix, dtype=BF16, method="gram").double()
    assert torch.linalg.svdvals(twice).max() <= BAND[1] + SLACK[BF16]
    assert default_restarts(BF16) == (2, 4)


def test_restarts_bound_what_rounding_does() -> None:
    """Without any, float16's negative eigenvalues are blown up; in float64 nothing changes."""
    matrix, _, _ = _with_spectrum((96, 128), _spectra(96)["geometric to 1e-4"])
    never = newton_schulz(matrix, dtype=F16, method="gram", restarts=()).double()
    assert torch.linalg.svdvals(never).max() > BAND[1] + 2 * SLACK[F16]
    exact = newton_schulz(matrix, dtype=F64, method="gram", restarts=())
    for restarts in ((1,), (2,), (4,), (1, 2, 3, 4), (9,)):
        same = newton_schulz(matrix, dtype=F64, method="gram", restarts=restarts)
        assert distance(same, exact) <= 1e-9


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@each_method
@each_shape
def test_zero_gives_zero(shape: tuple[int, int], dtype: torch.dtype, method: Any) -> None:
    result = newton_schulz(torch.zeros(shape), dtype=dtype, method=method)
    assert torch.equal(result, torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("scale", [1e-34, 1e-30, 1e-4, 1e10, 1e30, 1e35])
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@each_method
def test_the_scale_of_a_gradient_does_not_matter(
    scale: float, dtype: torch.dtype, method: Any
) -> None:
    """Neither squares nor float16 overflow or vanish, though the entries' squares would."""
    matrix = _gradient((48, 32))
    matrix /= matrix.abs().max()
    one = newton_schulz(matrix, dtype=dtype, method=method)
    assert distance(newton_schulz(scale * matrix, dtype=dtype, method=method), one) <= 1e-2
    if dtype == F32:
        assert distance(newton_schulz(scale * matrix, dtype=dtype, method=method), one) <= 1e-4


@each_method
def test_entries_of_all_scales_in_one_matrix(method: Any) -> None:
    """1e30 beside 1e-30: what is large is orthogonalised, what vanishes beside it stays small."""
    matrix = 1e-30 * _gradient((24, 40))
    matrix[:8] *= 1e30
    matrix[:8] *= 1e30
    result = newton_schulz(matrix, dtype=F32, method=method)
    assert torch.isfinite(result).all()
    alone = newton_schulz(matrix[:8], dtype=F32, method=method)
    assert distance(result[:8], alone) <= 1e-4
    assert result[8:].abs().max() <= 1e-6


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_a_bad_entry_gives_nan_and_spoils_no_other_matrix(bad: float, dtype: torch.dtype) -> None:
    batch = _gradient((3, 24, 40))
    expected = newton_schulz(batch, dtype=dtype)
    batch[1, 3, 5] = bad
    result = newton_schulz(batch, dtype=dtype)
    assert result[1].isnan().all()
    assert torch.equal(result[[0, 2]], expected[[0, 2]])
    assert newton_schulz(batch[1], dtype=dtype).isnan().all()
    huge = torch.full((3, 4), 3e38)  # finite, but its norm is not
    assert newton_schulz(huge, dtype=dtype).isnan().all()


@each_method
@pytest.mark.parametrize("shape", [(5, 24, 40), (5, 40, 24), (2, 3, 16, 16), (1, 8, 3)], ids=str)
def test_a_batch_is_each_matrix_by_itself(shape: tuple[int, ...], method: Any) -> None:
    """Experts are orthogonalised one by one and computed together."""
    batch = _gradient(shape)
    # Scales that a norm over the batch would mix up.
    batch *= torch.logspace(-6, 6, batch.shape[0]).view(-1, *[1] * (batch.ndim - 1))
    result = newton_schulz(batch, dtype=F32, method=method)
    assert result.shape == shape
    for one, matrix in zip(result.flatten(0, -3), batch.flatten(0, -3), strict=True):
        assert distance(one, newton_schulz(matrix, dtype=F32, method=method)) <= 1e-5


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 3, 4)], ids=str)
def test_nothing_gives_nothing(shape: tuple[int, ...]) -> None:
    assert newton_schulz(torch.zeros(shape), dtype=F32).shape == shape


def test_steps_and_coefficients_are_used() -> None:
    matrix = _gradient((6, 9)).double()
    scaled = matrix / matrix.norm()
    one = newton_schulz(matrix, steps=1, coefficients=(1.5, -0.5, 0.0), dtype=F64)
    torch.testing.assert_close(one, 1.5 * scaled - 0.5 * scaled @ scaled.T @ scaled)
    two = newton_schulz(
        matrix, steps=2, coefficients=[(1.5, -0.5, 0.0), (2.0, 0.0, 0.0)], dtype=F64
    )
    torch.testing.assert_close(two, 2 * one)


def test_a_list_shorter_than_the_steps_repeats_its_last_entry() -> None:
    assert per_step("polar_express", 7) == (*POLAR_EXPRESS, POLAR_EXPRESS[-1], POLAR_EXPRESS[-1])
    assert per_step("polar_express", 3) == POLAR_EXPRESS[:3]
    assert per_step("quintic", 2) == per_step(QUINTIC, 2) == per_step([QUINTIC], 2)


@pytest.mark.parametrize(
    "wrong", ["polar", (1.0, 2.0), [], [(1.0, 2.0)], (), 5, [(1.0, 2.0, 3.0), 5]], ids=str
)
def test_wrong_coefficients_are_named(wrong: Any) -> None:
    with pytest.raises(ValueError, match="ns_coefficients: expected"):
        per_step(wrong, 5)


def test_eps_bounds_the_divisor() -> None:
    """torch's meaning: a norm below eps is taken as eps."""
    matrix = torch.full((2, 3), 1e-6, dtype=F64)
    result = newton_schulz(matrix, steps=1, coefficients=(1.0, 0.0, 0.0), eps=1.0, dtype=F64)
    torch.testing.assert_close(result, matrix)


def test_auto_takes_the_method_with_fewer_operations() -> None:
    assert uses_gram(1536, 8960) and uses_gram(8960, 1536) and uses_gram(256, 1536)
    assert not uses_gram(1536, 1536) and not uses_gram(64, 64)
    for shape in [(64, 72), (64, 96), (64, 128), (1024, 1100), (5120, 27648)]:
        kinds = {k: flops(*shape, method=k) for k in ("gram", "standard")}
        better = GRAM_MARGIN * kinds["gram"] < kinds["standard"]
        assert uses_gram(*shape) == better
        assert flops(*shape) == kinds["gram" if better else "standard"]
    # By hand, halving symmetric products: two Gram matrices, 14 squares; two whole products.
    m, n = 1024, 4096
    assert flops(m, n, method="gram") == 2 * m * m * n + 14 * m**3 + 4 * m * m * n
    assert flops(m, n, method="standard") == 5 * (m * m * n + m**3 + 2 * m * m * n)


def test_dtypes_by_device() -> None:
    assert default_dtype(torch.device("cpu")) == F32
    assert default_dtype(torch.device("cuda")) == F16


def test_the_input_is_left_alone() -> None:
    for dtype in (F32, F64, F16):
        matrix = _gradient((9, 6)).to(dtype)
        before = matrix.clone()
        newton_schulz(matrix, dtype=F32)
        newton_schulz(matrix[:, ::2], dtype=F32)
        newton_schulz(matrix, dtype=dtype, method="gram")
        assert torch.equal(matrix, before)
