"""What each rank holds all the time, in bytes: masters, optimizer state, copies, gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchtitan_dmuon.optim.matrix_optimizer import MatrixOptimizer, checked_shapes
from torchtitan_dmuon.ownership import Assignment, Matrix, Summary
from torchtitan_dmuon.planner.memory import MASTER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The bytes of every rank, in rank order.

    Attributes:
        assignment: Owners.
        summary: Their loads.
        rule: Matrix optimizer; None: AdamW updates everything.
        owners: Whether ranks hold what they own, or even shards of the layers.
        pooled: Whether copies lie in the symmetric pool.
        matrix_numel: Elements of the matrices.
        rider_numel: Elements of the layers' small tensors.
        rest_numel: Elements outside the layers, which are sharded over the columns.
        param_bytes: Bytes of an element in the compute dtype.
        reduce_bytes: Bytes of an element of a gradient that is reduced.
        adam_bytes: AdamW's state of an element.
    """

    assignment: Assignment
    summary: Summary
    rule: MatrixOptimizer | None
    owners: bool
    pooled: bool
    matrix_numel: int
    rider_numel: int
    rest_numel: int
    param_bytes: int
    reduce_bytes: int
    adam_bytes: int

    def rest(self, element_bytes: float) -> float:
        """Return a rank's share of what is outside the layers."""
        return element_bytes * self.rest_numel / self.assignment.mesh.columns

    def state(self) -> list[float]:
        """Return optimizer state: of what is owned (paper section 4.4), or of shards."""
        rest = self.rest(self.adam_bytes)
        if not self.owners:
            own = self.adam_bytes if self.rule is None else MASTER_BYTES
            return [x + rest for x in self._even(own, self.adam_bytes)]
        held = [self.adam_bytes * load.rider_numel + rest for load in self.summary.rank_loads]
        assert self.rule is not None
        pairs = zip(self.assignment.units, self.assignment.owners, strict=True)
        sizes: dict[tuple[int, int], int] = {}
        for unit, owner in pairs:
            for matrix in unit.matrices:
                if matrix.shape not in sizes:
                    sizes[matrix.shape] = _state_bytes(self.rule, matrix)
                held[owner] += sizes[matrix.shape]
        return held

    def masters(self) -> list[float]:
        """Return FP32 parameters that the rank updates."""
        rest = self.rest(MASTER_BYTES)
        return [x + rest for x in self.reduced()]

    def reduced(self) -> list[float]:
        """Return reduced gradients of the layers in float32."""
        return self._owned(MASTER_BYTES) if self.owners else self._even(MASTER_BYTES, MASTER_BYTES)

    def gradients(self) -> list[float]:
        """Return reduced gradients as they are kept: in the pool's window, or in float32."""
        held = self.window() if self.pooled else self.reduced()
        rest = self.rest(MASTER_BYTES)
        return [x + rest for x in held]

    def window(self) -> list[float]:
        """Return the owner window: reduced gradients of what is owned, in the reduce dtype."""
        return self._owned(self.reduce_bytes) if self.owners else self._nothing()

    def copies(self) -> list[float]:
        """Return what the rank's node gathers from, in the compute dtype."""
        mesh = self.assignment.mesh
        if self.owners and mesh.columns == 1:
            return [float(self.param_bytes * (self.matrix_numel + self.rider_numel))] * mesh.size
        if not self.owners or mesh.rows == 1:
            return self._nothing()
        columns = [0.0] * mesh.columns
        for load in self.summary.rank_loads:
            elements = load.numel + load.rider_numel
            columns[mesh.column(load.rank)] += self.param_bytes * elements
        if self.pooled:
            # The pool is laid out alike on every rank, so the heaviest rail decides.
            columns = [max(columns)] * mesh.columns
        return [columns[mesh.column(rank)] for rank in range(mesh.size)]

    def _owned(self, element_bytes: float) -> list[float]:
        return [element_bytes * (x.numel + x.rider_numel) for x in self.summary.rank_loads]

    def _even(self, matrix_bytes: float, rider_bytes: float) -> list[float]:
        mesh = self.assignment.mesh
        total = matrix_bytes * self.matrix_numel + rider_bytes * self.rider_numel
        return [total / mesh.columns] * mesh.size

    def _nothing(self) -> list[float]:
        return [0.0] * self.assignment.mesh.size


def _state_bytes(rule: MatrixOptimizer, matrix: Matrix) -> int:
    """Return the bytes of float32 state of one matrix."""
    shapes = checked_shapes(rule, matrix.rows, matrix.columns).values()
    sizes = (matrix.shape if shape == "elementwise" else shape for shape in shapes)
    return sum(4 * math.prod(size) for size in sizes)
