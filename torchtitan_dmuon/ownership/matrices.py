"""Which matrices a parameter holds, and where they lie in its storage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan_dmuon.arguments import expect, is_count

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix of a parameter: what the matrix optimizer updates as a whole.

    Attributes:
        parameter: Fully qualified name of the parameter.
        index: Position among the matrices of the parameter.
        rows: Rows of the matrix, over all its blocks.
        columns: Columns of the matrix.
        offset: Elements from the start of the parameter's storage to the first element.
        blocks: Number of equal row blocks that the matrix is cut into in storage; 1 if contiguous.
        block_stride: Elements from the start of one block to the next; 0 if contiguous.
        stacked: Whether the parameter is a stack (3-D or more) of such matrices: an expert.
        count: Matrices that the parameter holds; decides whether the name carries the index.
    """

    parameter: str
    index: int
    rows: int
    columns: int
    offset: int
    blocks: int = 1
    block_stride: int = 0
    stacked: bool = False
    count: int = 1

    @property
    def name(self) -> str:
        """The parameter's name, with `[index]` if the parameter holds several matrices."""
        return self.parameter if self.count == 1 else f"{self.parameter}[{self.index}]"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.columns

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows, self.columns

    @property
    def contiguous(self) -> bool:
        """Whether the elements are one contiguous range of the parameter's storage."""
        return self.blocks == 1

    @property
    def piece_range(self) -> tuple[int, int]:
        """Offset and elements of the contiguous range that the matrix shares with no other piece.

        For a contiguous matrix that is the matrix itself, otherwise the whole interleaved weight.
        """
        if self.contiguous:
            return self.offset, self.numel
        numel = self.blocks * self.block_stride
        return self.offset // numel * numel, numel

    def view(self, flat: torch.Tensor, *, start: int = 0) -> torch.Tensor:
        """Return the matrix as a view of a buffer.

        Args:
            flat: 1-D contiguous tensor with the parameter's elements, any dtype and device.
            start: Element of the parameter that `flat[0]` is, if it holds only a piece.

        Returns:
            Shape `(rows, columns)`, or `(blocks, rows // blocks, columns)` if not contiguous.
        """
        base, numel = self.piece_range
        piece = flat.narrow(0, base - start, numel)
        if self.contiguous:
            return piece.view(self.rows, self.columns)
        block = self.numel // self.blocks
        part = piece.view(self.blocks, self.block_stride).narrow(1, self.offset - base, block)
        return part.view(self.blocks, self.rows // self.blocks, self.columns)


def _sizes(rows: Iterable[object]) -> bool:
    sizes = list(rows)
    return bool(sizes) and all(is_count(size, 1) for size in sizes)


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """How to read matrices out of a parameter.

    Without arguments a 2-D weight is one matrix, and the leading dimensions of a weight with three
    or more are a stack: one matrix per index, each with its own owner.

    Attributes:
        rows: Row blocks of the last two dimensions, each a matrix of its own: fused q/k/v, or
            gate/up. They must add up to the number of rows.
        blocks: How often the `rows` pattern repeats down the rows (interleaved q/k/v, one repeat
            per key-value head). Matrix j is the j-th row block of all repeats, stacked.
        flatten: Read dimensions 1 and up as the columns of one matrix (convolutions).

    Raises:
        ValueError: If `rows` is empty or has sizes below one, or `blocks` is below one or lacks
            `rows`.
    """

    rows: tuple[int, ...] | None = None
    blocks: int = 1
    flatten: bool = False

    def __post_init__(self) -> None:
        whole = "one or more whole numbers of at least 1"
        expect("rows", self.rows, lambda r: r is None or _sizes(r), whole)
        expect("blocks", self.blocks, lambda b: is_count(b, 1), "a whole number of at least 1")
        if self.rows is not None:
            object.__setattr__(self, "rows", tuple(self.rows))
        if self.blocks > 1 and self.rows is None:
            raise ValueError(f"{self}: blocks repeats the rows pattern, so rows must be given")

    def matrices(self, parameter: str, shape: Sequence[int]) -> tuple[Matrix, ...]:
        """Return the matrices of a parameter in storage order.

        Args:
            parameter: Fully qualified name, for the matrices' names and for errors.
            shape: Full (unsharded) shape of the parameter.

        Raises:
            ValueError: If the parameter has fewer than two dimensions, no elements, or rows that
                do not add up; it names the parameter, its shape and what does not fit.
        """
        sizes = tuple(int(size) for size in shape)
        if len(sizes) < 2:
            raise ValueError(f"{parameter} {sizes}: a matrix needs two dimensions or more")
        if min(sizes) < 1:
            raise ValueError(f"{parameter} {sizes}: every dimension must be at least 1")
        stack: tuple[int, ...] = ()
        if self.flatten:
            rows, columns = sizes[0], math.prod(sizes[1:])
        else:
            stack, (rows, columns) = sizes[:-2], sizes[-2:]
        pattern, blocks = self._pattern(parameter, sizes, rows)
        stride = sum(pattern) * columns
        starts = [sum(pattern[:j]) * columns for j in range(len(pattern))]
        indices = math.prod(stack)
        return tuple(
            Matrix(
                parameter=parameter,
                index=i * len(pattern) + j,
                rows=pattern[j] * blocks,
                columns=columns,
                offset=i * rows * columns + starts[j],
                blocks=blocks,
                block_stride=stride if blocks > 1 else 0,
                stacked=bool(stack),
                count=indices * len(pattern),
            )
            for i in range(indices)
            for j in range(len(pattern))
        )

    def _pattern(
        self, parameter: str, sizes: tuple[int, ...], rows: int
    ) -> tuple[tuple[int, ...], int]:
        """Return the row pattern and its repeats, checked against the number of rows."""
        if self.rows is None:
            return (rows,), 1
        found = sum(self.rows) * self.blocks
        if found != rows:
            times = f" times {self.blocks} blocks" if self.blocks > 1 else ""
            raise ValueError(
                f"{parameter} {sizes}: rows {self.rows}{times} add up to {found}, not to {rows}"
            )
        # A pattern of one block repeats without gaps, which is one contiguous matrix.
        return ((rows,), 1) if len(self.rows) == 1 else (self.rows, self.blocks)


@dataclass(frozen=True, slots=True)
class Piece:
    """Matrices of one parameter that share a contiguous range, hence an owner.

    Attributes:
        matrices: The matrices; several only if they are interleaved.
        offset: Elements from the start of the parameter's storage.
        numel: Elements of the range.
    """

    matrices: tuple[Matrix, ...]
    offset: int
    numel: int

    @property
    def parameter(self) -> str:
        """Name of the parameter."""
        return self.matrices[0].parameter


def segments(matrices: Iterable[Matrix]) -> tuple[Piece, ...]:
    """Group the matrices of one parameter into pieces that can have different owners.

    A contiguous matrix is a piece of its own. Interleaved matrices (`blocks` above 1) cover a
    common range that no owner could send as one block, so they form one piece (one per index if
    the parameter is a stack).

    Args:
        matrices: Matrices of one parameter, as `MatrixSpec.matrices` gives them.

    Raises:
        ValueError: If they belong to different parameters.
    """
    ranges: dict[tuple[int, int], list[Matrix]] = {}
    names = set()
    for matrix in matrices:
        ranges.setdefault(matrix.piece_range, []).append(matrix)
        names.add(matrix.parameter)
    if len(names) > 1:
        raise ValueError(f"segments() takes matrices of one parameter, not of {sorted(names)}")
    return tuple(Piece(tuple(ranges[key]), *key) for key in sorted(ranges))
