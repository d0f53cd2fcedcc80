"""Full tensors of which a rank holds boxes: the boxes are exactly what the rank holds."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_dmuon.checkpoint.held import Part, boxes_of

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def stretches(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """Return a shape, and a stretch of its elements."""
    shape = draw(SHAPES)
    numel = math.prod(shape)
    start = draw(st.integers(0, numel))
    return shape, start, draw(st.integers(0, numel - start))


def _cut(numel: int, cuts: list[int]) -> list[tuple[int, int]]:
    edges = sorted({0, numel, *(cut % (numel + 1) for cut in cuts)})
    return list(pairwise(edges))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(stretches())
def test_boxes_partition_the_stretch(case: tuple[tuple[int, ...], int, int]) -> None:
    """Boxes are inside the tensor, and hold each element of the stretch once, in its order: for
    any number of dimensions, and for tensors and stretches without elements."""
    shape, start, numel = case
    if not shape and not numel:
        return  # a scalar has no part
    whole = torch.arange(math.prod(shape)).view(shape)
    found = []
    for offsets, sizes in boxes_of(shape, start, numel):
        assert len(offsets) == len(sizes) == len(shape)
        box = whole
        for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            assert offset >= 0 and size > 0 and offset + size <= shape[dimension]
            box = box.narrow(dimension, offset, size)
        found += box.flatten().tolist()
    assert found == list(range(start, start + numel))


def test_boxes_are_few() -> None:
    """Whole rows, and whole matrices of a stack, are one box: a matrix is one item of the file."""
    assert boxes_of((7, 5), 0, 35) == [((0, 0), (7, 5))]
    assert boxes_of((4, 7, 5), 35, 70) == [((1, 0, 0), (2, 7, 5))]
    assert boxes_of((7, 5), 5, 10) == [((1, 0), (2, 5))]
    assert len(boxes_of((7, 5), 3, 20)) == 3
    assert boxes_of((1, 9), 2, 3) == [((0, 2), (1, 3))]
    assert boxes_of((), 0, 1) == [((), ())]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SHAPES, st.lists(st.integers(0, 700), max_size=6))
def test_stretches_of_all_ranks_make_the_tensor(shape: tuple[int, ...], cuts: list[int]) -> None:
    """However a parameter's storage is cut over ranks, their boxes together are the tensor, each
    element once; boxes are views, so that loading writes into the live storage."""
    numel = math.prod(shape)
    live = torch.arange(1.0, numel + 1)
    full = torch.zeros(shape)
    part = Part.whole("weight", shape)
    for start, end in _cut(numel, cuts) or [(0, 0)]:
        held = part.hold(torch.float32, [(start, live[start:end])])
        assert held.size() == torch.Size(shape) and held.dtype == torch.float32
        for offsets, box in held.boxes:
            assert box.untyped_storage().data_ptr() == live.untyped_storage().data_ptr()
            target = full
            for dimension, (offset, size) in enumerate(zip(offsets, box.shape, strict=True)):
                target = target.narrow(dimension, offset, size)
            assert not target.any()
            target.copy_(box)
    assert torch.equal(full, live.view(shape))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 3),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    st.integers(1, 4),
    st.lists(st.integers(0, 700), max_size=6),
)
def test_interleaved_parts_are_put_together(
    blocks: int, rows: tuple[int, int, int], width: int, cuts: list[int]
) -> None:
    """Parts that lie in a parameter in turns (Q, K and V of each head group) come out whole, each
    with its own rows in order, however the storage is cut."""
    block = sum(rows)
    live = torch.arange(1.0, blocks * block * width + 1)
    source = live.view(blocks, block, width)
    first = 0
    for count in rows:
        runs = tuple(
            ((b * block + first) * width, count * width, b * count * width) for b in range(blocks)
        )
        part = Part("wq", (blocks * count, width), runs)
        full = torch.zeros(part.shape)
        for start, end in _cut(live.numel(), cuts):
            for offsets, box in part.hold(live.dtype, [(start, live[start:end])]).boxes:
                rows_here = full.narrow(0, offsets[0], box.shape[0])
                target = rows_here.narrow(1, offsets[1], box.shape[1])
                assert not target.any()
                target.copy_(box)
        assert torch.equal(full, source[:, first : first + count].reshape(-1, width))
        first += count


def test_a_tensor_without_elements_is_held() -> None:
    """Its one box says that it is there."""
    held = Part.whole("empty", (0, 4)).hold(torch.float32, [(0, torch.empty(0))])
    ((offsets, box),) = held.boxes
    assert offsets == (0, 0) and box.shape == (0, 4)
