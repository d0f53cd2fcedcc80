"""Full tensors of which a rank holds some boxes: what is saved and loaded of owned parameters.

torch.distributed.checkpoint (DCP) stores a tensor as boxes and reads any box from them. So a matrix
is written by its owner alone, under its plain name and with its full shape, and the file does not
know who owned what.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, one number for each dimension."""


class HeldTensor:
    """A tensor of a checkpoint, and the boxes of it that this rank holds (or is to be given).

    Not a `torch.Tensor`: most of its elements are elsewhere. DCP asks it for its boxes; staging
    copies it by its attributes, so it has no other state.

    Attributes:
        shape: The full shape.
        dtype: Of the boxes here, and of what is saved.
        boxes: Offsets of each box, with the live tensor of the box's shape. Boxes of one rank do
            not overlap; those of several ranks may be equal, and one of them is then written.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        boxes: Iterable[tuple[tuple[int, ...], torch.Tensor]],
    ) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.boxes = list(boxes)

    def size(self) -> torch.Size:
        """Return the full shape."""
        return self.shape

    def to(self, dtype: torch.dtype) -> HeldTensor:
        """Return a copy in another dtype."""
        return HeldTensor(self.shape, dtype, [(o, t.to(dtype)) for o, t in self.boxes])

    def at(self, index: MetadataIndex) -> torch.Tensor:
        """Return the box that starts at an index's offset."""
        for offsets, tensor in self.boxes:
            if index.offset is not None and tuple(index.offset) == offsets:
                return tensor
        raise KeyError(f"{index.fqn}: no box at {tuple(index.offset or ())} on this rank")

    # What DCP asks of an object that is not a tensor.

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), tensor.size()),
                    properties=TensorProperties.create_from_tensor(tensor),
                    size=self.shape,
                ),
            )
            for offsets, tensor in self.boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), tensor.size())
            for offsets, tensor in self.boxes
        ]


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the checkpoint as a part of a parameter's storage.

    Most parameters are one part, the whole. A fused QKV weight is three: the checkpoint has wq, wk
    and wv, so that models with and without fusion read each other's.

    Attributes:
        name: Canonical name of the tensor in the checkpoint.
        shape: Its shape.
        runs: (first element in the parameter, elements, first element in the tensor), in order.
    """

    name: str
    shape: tuple[int, ...]
    runs: tuple[tuple[int, int, int], ...]

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> Part:
        """Return the part that is all of a parameter."""
        return cls(name, tuple(shape), ((0, math.prod(shape), 0),))

    def hold(self, dtype: torch.dtype, stretches: Iterable[tuple[int, torch.Tensor]]) -> HeldTensor:
        """Return the tensor with the boxes that lie in stretches of the parameter's storage.

        Args:
            dtype: Of the stretches.
            stretches: (first element in the parameter, live 1-D tensor), those of this rank.
        """
        boxes = []
        for start, flat in stretches:
            if not math.prod(self.shape):
                boxes.append(((0,) * len(self.shape), flat.view(self.shape)))
                continue
            for source, numel, target in self.runs:
                first, end = max(start, source), min(start + flat.numel(), source + numel)
                if first < end:
                    live = flat[first - start : end - start]
                    boxes += _cut(self.shape, target + first - source, live)
        return HeldTensor(self.shape, dtype, boxes)


def _cut(
    shape: tuple[int, ...], start: int, flat: torch.Tensor
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    position = 0
    for offsets, sizes in boxes_of(shape, start, flat.numel()):
        numel = math.prod(sizes)
        yield offsets, flat[position : position + numel].view(sizes)
        position += numel


def boxes_of(shape: Sequence[int], start: int, numel: int) -> list[Box]:
    """Cut a contiguous stretch of a row-major tensor into boxes, in the order of the elements.

    Whole rows (or whole matrices of a stack) are one box.
    """
    if not shape:
        return [((), ())]
    width = math.prod(shape[1:])
    result: list[Box] = []
    end = start + numel
    while start < end:
        row, within = divmod(start, width)
        rows = (end - start) // width
        if within or not rows:
            # Part of one row.
            length = min(width - within, end - start)
            for offsets, sizes in boxes_of(shape[1:], within, length):
                result.append(((row, *offsets), (1, *sizes)))
        else:
            length = rows * width
            zeros = (0,) * (len(shape) - 1)
            result.append(((row, *zeros), (rows, *shape[1:])))
        start += length
    return result
