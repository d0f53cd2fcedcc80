"""Newton-Schulz against the textbook in float64, and against torch.optim.Muon in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch.optim import _muon as torch_muon

from tests.runtime.reference import distance
from tests.runtime.reference import newton_schulz as textbook
from torchtitan_dmuon.optim.newton_schulz import DEFAULT_COEFFICIENTS, newton_schulz

SHAPES = [(48, 32), (32, 48), (64, 64), (1, 40), (40, 1), (3, 200), (200, 3), (7, 5), (1, 1)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")


def _gradient(shape: tuple[int, int]) -> torch.Tensor:
    """Full rank, and well enough conditioned that precision is all that differs."""
    torch.manual_seed(sum(shape))
    return torch.randn(512, shape[0]).T @ torch.randn(512, shape[1])


@each_shape
def test_fp32_is_the_textbook(shape: tuple[int, int]) -> None:
    matrix = _gradient(shape)
    result = newton_schulz(matrix, dtype=torch.float32)
    assert result.shape == shape and result.dtype == torch.float32
    assert distance(result, textbook(matrix.double())) <= 1e-4


@each_shape
def test_fp64_is_the_textbook_exactly(shape: tuple[int, int]) -> None:
    """In its own precision nothing is left: the iteration itself is the same."""
    matrix = _gradient(shape).double()
    assert distance(newton_schulz(matrix, dtype=torch.float64), textbook(matrix)) <= 1e-10


@each_shape
def test_bf16_is_torch_muon(shape: tuple[int, int]) -> None:
    """Both iterate in bfloat16 with the same products: less than one rounding (2^-8) apart."""
    matrix = _gradient(shape)
    peer = torch_muon._zeropower_via_newtonschulz(matrix, DEFAULT_COEFFICIENTS, 5, 1e-7)
    result = newton_schulz(matrix)
    assert result.dtype == torch.bfloat16
    assert distance(result, peer) <= 2**-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_shape
def test_zero_gives_zero(shape: tuple[int, int], dtype: torch.dtype) -> None:
    result = newton_schulz(torch.zeros(shape), dtype=dtype)
    assert torch.equal(result, torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("scale", [1e-4, 1e10])
def test_the_scale_of_a_gradient_does_not_matter(scale: float) -> None:
    matrix = _gradient((48, 32))
    one = newton_schulz(matrix, dtype=torch.float32)
    assert distance(newton_schulz(scale * matrix, dtype=torch.float32), one) <= 1e-4


def test_singular_values_end_near_one_and_directions_stay() -> None:
    matrix = _gradient((48, 32)).double()
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    found = u.T @ newton_schulz(matrix, dtype=torch.float64) @ v.T
    assert torch.allclose(found, torch.diag(found.diag()), atol=1e-10)
    assert (s / s.norm()).max() < 0.5, "the input was orthogonal already: no power"
    assert found.diag().min() > 0.5 and found.diag().max() < 1.3


def test_steps_and_coefficients_are_used() -> None:
    matrix = _gradient((6, 9)).double()
    scaled = matrix / matrix.norm()
    one = newton_schulz(matrix, steps=1, coefficients=(1.5, -0.5, 0.0), dtype=torch.float64)
    torch.testing.assert_close(one, 1.5 * scaled - 0.5 * scaled @ scaled.T @ scaled)
    two = newton_schulz(matrix, steps=2, dtype=torch.float64)
    torch.testing.assert_close(two, textbook(matrix, steps=2))


def test_eps_bounds_the_divisor() -> None:
    matrix = torch.full((2, 3), 1e-6, dtype=torch.float64)
    result = newton_schulz(
        matrix, steps=1, coefficients=(1.0, 0.0, 0.0), eps=1.0, dtype=torch.float64
    )
    torch.testing.assert_close(result, matrix)


def test_the_input_is_left_alone() -> None:
    matrix = _gradient((9, 6))
    before = matrix.clone()
    newton_schulz(matrix, dtype=torch.float32)
    newton_schulz(matrix[:, ::2], dtype=torch.float32)
    assert torch.equal(matrix, before)
