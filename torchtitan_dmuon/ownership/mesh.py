"""The R x K grid of ranks that owners are chosen from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OwnerMesh:
    """R rows (nodes, the replicate axis) by K columns (GPUs of a node, the shard axis).

    Rank `r * K + s` is in row r and column s. A plain FSDP or DDP group of N ranks is 1 x N or
    N x 1; the assignment is the same for both.

    Attributes:
        rows: R, at least 1.
        columns: K, at least 1.

    Raises:
        ValueError: If a size is below 1.
    """

    rows: int
    columns: int

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1:
            raise ValueError(f"an owner mesh needs at least 1 x 1 ranks, not {self}")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.rows * self.columns

    def rank(self, row: int, column: int) -> int:
        """Return the rank at a row and a column."""
        if not (0 <= row < self.rows and 0 <= column < self.columns):
            raise ValueError(f"row {row}, column {column} is outside the {self} mesh")
        return row * self.columns + column

    def row(self, rank: int) -> int:
        """Return the row (node) of a rank."""
        return self._checked(rank) // self.columns

    def column(self, rank: int) -> int:
        """Return the column (rail) of a rank: where the leaders of what it owns are."""
        return self._checked(rank) % self.columns

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is outside the {self} mesh")
        return rank

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns}"
