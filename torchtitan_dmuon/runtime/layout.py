"""Where the parameters of a group lie in its buffer, and who owns which stretch.

A layout is a pure function of the layer and the assignment, the same on every rank. Parameters are
contiguous in the buffer, so that the model can use views of it; those of one owner lie side by
side, so that they travel as one stretch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torchtitan_dmuon.comm import Run
from torchtitan_dmuon.ownership import Assignment, Layer, Matrix, OwnerMesh, segments

# Parameters start at multiples of 64 bytes in every dtype of at least two bytes: as aligned as what
# torch's allocators give, so that kernels compute the same bits there.
ALIGNMENT_NUMEL = 32


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A contiguous stretch of one parameter with one owner.

    Attributes:
        parameter: Index of the parameter in its group.
        start: First element within the parameter's storage.
        numel: Elements.
        offset: First element within the group's buffer.
        row: Owner's row of the mesh; -1 if every row holds it (line B).
        column: Owner's column of the mesh.
        unit: Index of the assignment unit; -1 in line B.
        matrices: The matrices in it; empty if it is updated elementwise.
    """

    parameter: int
    start: int
    numel: int
    offset: int
    row: int
    column: int
    unit: int
    matrices: tuple[Matrix, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The table of a group's buffer.

    Attributes:
        offsets: First element of each parameter, in the order of the layer.
        numel: Elements of the buffer, gaps included.
        segments: All segments, in the order of the buffer.
    """

    offsets: tuple[int, ...]
    numel: int
    segments: tuple[Segment, ...]

    def runs(self, parameters: Collection[int], *, columns_only: bool) -> tuple[Run, ...]:
        """Return the stretches of neighbouring segments that have one owner.

        Args:
            parameters: Indices of the parameters that take part.
            columns_only: Whether owners in the same column count as one (gathers in a row).
        """
        runs: list[Run] = []
        previous_end = -1
        for s in self.segments:
            if s.parameter not in parameters or s.numel == 0:
                continue
            last = runs[-1] if runs else None
            near = last is not None and are_neighbours(previous_end, s)
            if last and near and s.column == last.column and (columns_only or s.row == last.row):
                runs[-1] = Run(last.offset, s.offset + s.numel - last.offset, last.row, last.column)
            else:
                runs.append(Run(s.offset, s.numel, s.row, s.column))
            previous_end = s.offset + s.numel
        return tuple(runs)

    def digest(self) -> str:
        """Return a digest that differs if any offset, size or owner differs."""
        rows = [(s.parameter, s.start, s.numel, s.offset, s.row, s.column) for s in self.segments]
        return hashlib.sha256(repr((self.offsets, self.numel, rows)).encode()).hexdigest()


def owner_layout(layer_index: int, layer: Layer, assignment: Assignment) -> Layout:
    """Lay out a layer whose matrices have owners, those of one owner and unit side by side."""
    mesh = assignment.mesh
    owners: dict[str, tuple[int, int]] = {}
    for unit, (entry, owner) in enumerate(zip(assignment.units, assignment.owners, strict=True)):
        if entry.layer == layer_index:
            names = [m.name for m in entry.matrices] + list(entry.parameters)
            owners.update(dict.fromkeys(names, (owner, unit)))
    pieces: list[list[tuple[int, int, tuple[Matrix, ...], tuple[int, int]]]] = []
    for p in layer.parameters:
        parts = segments(p.matrices) if p.matrices else ()
        cut = [(s.offset, s.numel, s.matrices, owners[s.matrices[0].name]) for s in parts]
        pieces.append(cut or [(0, p.numel, (), owners[p.name])])

    def key(index: int) -> tuple[int, int, int, int, int]:
        owner, unit = pieces[index][0][3]
        mixed = any(piece[3][0] != owner for piece in pieces[index])
        # Parameters with several owners go last: they cannot lie beside all of them.
        return int(mixed), mesh.column(owner), mesh.row(owner), unit, index

    offsets, result, position = [0] * len(pieces), [], 0
    for index in sorted(range(len(pieces)), key=key):
        position = align(position)
        offsets[index] = position
        for start, numel, matrices, (owner, unit) in pieces[index]:
            row, column = mesh.row(owner), mesh.column(owner)
            result.append(
                Segment(index, start, numel, position + start, row, column, unit, matrices)
            )
        position += layer.parameters[index].numel
    return Layout(tuple(offsets), align(position), tuple(result))


def shard_layout(layer: Layer, mesh: OwnerMesh) -> Layout:
    """Lay out a layer as FSDP2 shards it: dimension 0 in `columns` parts, the last ones short."""
    offsets, result, position = [], [], 0
    for index, p in enumerate(layer.parameters):
        position = align(position)
        offsets.append(position)
        for column, (start, numel) in enumerate(shards(p.shape, mesh.columns)):
            result.append(Segment(index, start, numel, position + start, -1, column, -1, ()))
        position += p.numel
    return Layout(tuple(offsets), align(position), tuple(result))


def shards(shape: Sequence[int], columns: int) -> list[tuple[int, int]]:
    """Return (first element, elements) of each column's shard of a parameter."""
    length = shape[0] if shape else 1
    width = 1
    for size in shape[1:]:
        width *= size
    chunk = -(-length // columns)
    edges = [min(c * chunk, length) * width for c in range(columns + 1)]
    return [(edges[c], edges[c + 1] - edges[c]) for c in range(columns)]


def are_neighbours(end: int, s: Segment) -> bool:
    """Whether nothing but the gap of alignment lies between element `end` and a segment."""
    return s.offset - end < ALIGNMENT_NUMEL


def align(position: int) -> int:
    """Return the first aligned element at or behind `position`."""
    return -(-position // ALIGNMENT_NUMEL) * ALIGNMENT_NUMEL
