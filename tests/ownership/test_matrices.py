"""Matrices read out of parameters: views, pieces and errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_dmuon.ownership import Matrix, MatrixSpec, segments


def test_plain_weight_is_one_matrix() -> None:
    assert MatrixSpec().matrices("w", (6, 4)) == (Matrix("w", 0, 6, 4, 0),)
    assert MatrixSpec().matrices("w", (6, 4))[0].name == "w"


def test_fused_rows_and_flattened_convolution() -> None:
    q, k, v = MatrixSpec(rows=(4, 1, 1)).matrices("qkv", (6, 5))
    assert [m.shape for m in (q, k, v)] == [(4, 5), (1, 5), (1, 5)]
    assert [m.offset for m in (q, k, v)] == [0, 20, 25]
    assert [m.name for m in (q, k, v)] == ["qkv[0]", "qkv[1]", "qkv[2]"]
    (conv,) = MatrixSpec(flatten=True).matrices("conv", (8, 3, 2, 2))
    assert conv.shape == (8, 12) and not conv.stacked
    assert len(MatrixSpec().matrices("conv", (8, 3, 2, 2))) == 24


def test_expert_stack_is_one_matrix_per_expert() -> None:
    experts = MatrixSpec().matrices("experts", (3, 4, 5))
    assert [(m.offset, m.shape, m.stacked) for m in experts] == [
        (20 * i, (4, 5), True) for i in range(3)
    ]
    gate_up = MatrixSpec(rows=(2, 2)).matrices("experts", (3, 4, 5))
    assert [m.offset for m in gate_up] == [10 * i for i in range(6)]
    # A stack of one is still an expert, with the parameter's own name.
    assert MatrixSpec().matrices("experts", (1, 4, 5))[0].stacked


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_views_cover_the_parameter_once(
    pattern: list[int], blocks: int, columns: int, stack: int
) -> None:
    rows = sum(pattern) * blocks
    spec = MatrixSpec(rows=tuple(pattern), blocks=blocks)
    matrices = spec.matrices("w", (stack, rows, columns))
    weight = torch.zeros(stack, rows, columns)
    for number, m in enumerate(matrices):
        view = m.view(weight.view(-1))
        assert view.numel() == m.numel
        view += number + 1
    # Row r of an index belongs to the part of the pattern that r falls into.
    parts = [j for _ in range(blocks) for j, size in enumerate(pattern) for _ in range(size)]
    if len(pattern) == 1:
        parts = [0] * rows
    for i in range(stack):
        want = [i * len(pattern) + j + 1 for j in parts]
        assert weight[i, :, 0].tolist() == want
        assert weight[i, :, -1].tolist() == want


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 3))
def test_pieces_partition_the_storage(pattern: list[int], blocks: int, stack: int) -> None:
    shape = (stack, sum(pattern) * blocks, 3)
    matrices = MatrixSpec(rows=tuple(pattern), blocks=blocks).matrices("w", shape)
    pieces = segments(reversed(matrices))
    ends = [piece.offset + piece.numel for piece in pieces]
    assert [piece.offset for piece in pieces] == [0, *ends[:-1]]
    assert ends[-1] == shape[0] * shape[1] * shape[2]
    assert sorted(m.index for piece in pieces for m in piece.matrices) == list(range(len(matrices)))
    interleaved = blocks > 1 and len(pattern) > 1
    assert len(pieces) == (stack if interleaved else len(matrices))
    # An owner holds the piece alone; the matrix is found in it just the same.
    flat = torch.arange(ends[-1])
    for piece in pieces:
        alone = flat[piece.offset : piece.offset + piece.numel].clone()
        for m in piece.matrices:
            assert torch.equal(m.view(alone, start=piece.offset), m.view(flat))


def test_interleaved_view_has_blocks_first() -> None:
    weight = torch.arange(3 * 4 * 2).view(12, 2)
    q, k = MatrixSpec(rows=(3, 1), blocks=3).matrices("qk", (12, 2))
    assert not q.contiguous and q.shape == (9, 2)
    assert torch.equal(q.view(weight.view(-1)), weight.view(3, 4, 2)[:, :3])
    assert torch.equal(k.view(weight.view(-1)), weight.view(3, 4, 2)[:, 3:])
    assert segments((q, k))[0].numel == 24


@pytest.mark.parametrize(
    ("spec", "shape", "said"),
    [
        (MatrixSpec(), (8,), "layers.0.w \\(8,\\): a matrix needs two dimensions"),
        (MatrixSpec(rows=(4, 4)), (8,), "layers.0.w \\(8,\\): a matrix needs two dimensions"),
        (MatrixSpec(), (8, 0), "layers.0.w \\(8, 0\\): every dimension must be at least 1"),
        (MatrixSpec(rows=(4, 2)), (8, 3), "rows \\(4, 2\\) add up to 6, not to 8"),
        (MatrixSpec(rows=(2, 1), blocks=2), (8, 3), "times 2 blocks add up to 6, not to 8"),
    ],
)
def test_shapes_that_do_not_fit(spec: MatrixSpec, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        spec.matrices("layers.0.w", shape)


def test_specs_that_make_no_sense() -> None:
    for rows in ((), (4, 0), (4, -1)):
        with pytest.raises(ValueError, match="rows: expected one or more whole numbers"):
            MatrixSpec(rows=rows)
    with pytest.raises(ValueError, match="rows must be given"):
        MatrixSpec(blocks=2)
    with pytest.raises(ValueError, match="blocks: expected a whole number of at least 1"):
        MatrixSpec(rows=(1,), blocks=0)
    with pytest.raises(ValueError, match="one parameter"):
        segments(MatrixSpec().matrices("a", (2, 2)) + MatrixSpec().matrices("b", (2, 2)))
