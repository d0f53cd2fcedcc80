"""Newton-Schulz seconds per matrix shape: measured, modelled or read from a file."""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .matrices import Matrix
from .units import Unit

Shape = tuple[int, int]

# The model behind `model_cost`: round numbers for a device of the H100 class, not a measurement.
MODEL_STEPS = 5
MODEL_FLOPS_PER_SECOND = 5.0e14
MODEL_OVERHEAD_SECONDS = 2.0e-4

FILE_VERSION = 1


@dataclass(frozen=True)
class CostTable:
    """Seconds of one orthogonalization per exact shape.

    A matrix and its transpose are two entries: their kernels differ.

    Attributes:
        seconds: Positive seconds by (rows, columns).
        source: Where the numbers come from: "model", "measured", or a file's own word.

    Raises:
        ValueError: If an entry is not positive and finite.
    """

    seconds: Mapping[Shape, float]
    source: str

    def __post_init__(self) -> None:
        # Sorted, so that nothing can depend on the order in which shapes were met.
        table = {(int(r), int(c)): float(s) for (r, c), s in sorted(self.seconds.items())}
        for (rows, columns), seconds in table.items():
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"cost of {rows} x {columns} must be positive, not {seconds}")
        object.__setattr__(self, "seconds", table)

    def of(self, matrix: Matrix) -> float:
        """Return the seconds of a matrix.

        Raises:
            ValueError: If the table has no entry for its shape.
        """
        try:
            return self.seconds[matrix.shape]
        except KeyError:
            raise ValueError(
                f"the cost table ({self.source}) has no entry for {matrix.name} of shape "
                f"{matrix.rows} x {matrix.columns}; measure that shape or use cost='model'"
            ) from None

    def unit_seconds(self, unit: Unit) -> float:
        """Return the seconds of a unit: its matrices added one by one, in the unit's order.

        The order is fixed because ranks must agree on ties to the last bit.
        """
        total = 0.0
        for matrix in unit.matrices:
            total += self.of(matrix)
        return total

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table as JSON. Readers see the old file or the new one, never a part."""
        entries = [
            {"rows": rows, "columns": columns, "seconds": seconds}
            for (rows, columns), seconds in self.seconds.items()
        ]
        text = json.dumps(
            {"version": FILE_VERSION, "source": self.source, "seconds": entries}, indent=1
        )
        target = Path(path)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text + "\n")
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostTable:
        """Read a table that `save` wrote; the numbers are the same to the last bit.

        Raises:
            ValueError: If the file is not such a table; it names the file.
            OSError: If it cannot be read.
        """
        text = Path(path).read_text(encoding="utf-8")
        try:
            data = json.loads(text)
            version, source = data["version"], str(data["source"])
            entries = [(e["rows"], e["columns"], float(e["seconds"])) for e in data["seconds"]]
            table = cls({(int(r), int(c)): s for r, c, s in entries}, source)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{os.fspath(path)} is not a cost table: {error!r}") from error
        if version != FILE_VERSION:
            raise ValueError(
                f"{os.fspath(path)} is a cost table of version {version}, not {FILE_VERSION}"
            )
        return table


def model_cost(shapes: Iterable[Shape]) -> CostTable:
    """Return a table from a formula, for planning without a device.

    Five steps of textbook Newton-Schulz on an m x n matrix with m <= n take two m x n x m products
    and one m x m x m product each: 4 m^2 n + 2 m^3 operations a step. A fixed overhead stands for
    launches. It ranks shapes plausibly; it predicts no real device.
    """
    table = {}
    for rows, columns in shapes:
        m, n = sorted((rows, columns))
        flops = MODEL_STEPS * (4 * m * m * n + 2 * m**3)
        table[rows, columns] = MODEL_OVERHEAD_SECONDS + flops / MODEL_FLOPS_PER_SECOND
    return CostTable(table, "model")


def measure(shapes: Iterable[Shape], run: Callable[[int, int], float]) -> CostTable:
    """Return a table from one measurement per distinct shape.

    Args:
        shapes: Shapes, repeats allowed.
        run: Takes rows and columns, returns seconds. It is called in ascending order of shapes, so
            that ranks which measure together measure the same thing at the same time.
    """
    distinct = sorted({(int(rows), int(columns)) for rows, columns in shapes})
    return CostTable({shape: run(*shape) for shape in distinct}, "measured")


def median(tables: Sequence[CostTable]) -> CostTable:
    """Return the median per shape over the tables of all ranks.

    Noise on one rank then hardly moves the assignment. With an even number of tables the median is
    the mean of the middle two.

    Raises:
        ValueError: If there is no table, or the tables list different shapes.
    """
    if not tables:
        raise ValueError("median() needs at least one cost table")
    shapes = tables[0].seconds.keys()
    for index, table in enumerate(tables):
        different = sorted(shapes ^ table.seconds.keys())
        if different:
            raise ValueError(
                f"cost tables 0 and {index} list different shapes: {different[0]} is in one only"
            )
    values = {shape: statistics.median(t.seconds[shape] for t in tables) for shape in shapes}
    return CostTable(values, tables[0].source)
