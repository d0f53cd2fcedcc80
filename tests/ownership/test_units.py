"""Units: what is small, what rides along, and in which order."""

from __future__ import annotations

import pytest

from torchtitan_dmuon.ownership import SMALL_MATRIX_NUMEL, Layer, MatrixSpec, build_units

from .shapes import matrix, vector


def test_small_matrices_share_a_unit_with_the_riders() -> None:
    layer = Layer(
        "l", (vector("norm", 7), matrix("big", 10, 10), matrix("a", 3, 3), matrix("b", 2, 3))
    )
    big, small = build_units([layer], small_matrix_numel=100)
    assert (big.name, big.parameters, big.numel) == ("big", (), 100)
    assert [m.name for m in small.matrices] == ["a", "b"]
    assert (small.parameters, small.numel, small.rider_numel) == (("norm",), 15, 7)


def test_threshold_is_strict() -> None:
    layer = Layer("l", (matrix("a", 1000, SMALL_MATRIX_NUMEL // 1000), matrix("b", 2048, 2048)))
    assert [unit.name for unit in build_units([layer])] == ["a", "b"]
    merged = build_units([layer], small_matrix_numel=SMALL_MATRIX_NUMEL + 1)
    assert [len(unit.matrices) for unit in merged] == [2]


def test_layer_without_small_matrices_has_a_unit_of_riders() -> None:
    layer = Layer("l", (matrix("big", 10, 10), vector("norm", 7), vector("bias", 3)))
    big, riders = build_units([layer], small_matrix_numel=10)
    assert big.parameters == ()
    assert (riders.matrices, riders.parameters, riders.name) == ((), ("norm", "bias"), "norm")
    assert (riders.numel, riders.rider_numel) == (0, 10)
    assert build_units([Layer("empty", ())]) == ()


def test_experts_are_units_however_small() -> None:
    layer = Layer("l", (matrix("router", 4, 2), matrix("experts", 3, 2, 2), vector("norm", 2)))
    assert [unit.name for unit in build_units([layer])] == [
        "router", "experts[0]", "experts[1]", "experts[2]",
    ]  # fmt: skip


def test_interleaved_matrices_stay_together() -> None:
    spec = MatrixSpec(rows=(4, 1), blocks=2)
    layer = Layer("l", (matrix("qk", 10, 10, spec=spec), matrix("small", 2, 2)))
    # q has 80 elements and k 20: a large one takes the other along, two small ones are small.
    large, small = build_units([layer], small_matrix_numel=50)
    assert [m.name for m in large.matrices] == ["qk[0]", "qk[1]"]
    assert small.name == "small"
    assert len(build_units([layer], small_matrix_numel=81)) == 1
    # The same shapes without interleaving can have different owners.
    split = Layer("l", (matrix("qk", 10, 10, spec=MatrixSpec(rows=(8, 2))),))
    assert [u.name for u in build_units([split], small_matrix_numel=50)] == ["qk[0]", "qk[1]"]


def test_a_parameter_is_in_one_layer() -> None:
    layers = [Layer("a", (matrix("tied", 2, 2),)), Layer("b", (matrix("tied", 2, 2),))]
    with pytest.raises(ValueError, match="'tied' is in layer 'b' and in layer 'a'"):
        build_units(layers)
    with pytest.raises(ValueError, match="small_matrix_numel"):
        build_units([], small_matrix_numel=-1)
