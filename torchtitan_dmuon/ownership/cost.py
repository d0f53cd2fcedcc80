"""Seconds per matrix shape that owners are balanced by: measured, modelled or from a table."""

from __future__ import annotations

import difflib
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .matrices import Matrix
from .units import Unit

Shape = tuple[int, int]

# The model behind `model_cost`: round numbers for a device of the H100 class, not a measurement.
MODEL_FLOPS_PER_SECOND = 5.0e14
MODEL_OVERHEAD_SECONDS = 2.0e-4

FILE_VERSION = 2

_MOST_SECONDS = 1e6  # of one matrix; more is a mistake of units, and sums must stay finite

TABLES_FOLDER = Path(__file__).resolve().parent / "tables"
"""The tables that come with the package: `NAME.json`."""


@dataclass(frozen=True)
class CostTable:
    """Seconds of one update per exact shape.

    A matrix and its transpose are two entries: their kernels differ.

    Attributes:
        seconds: Positive seconds by (rows, columns).
        source: Where the numbers come from, in a few words: "model", "measured", or a file's own.
        algorithm: Name of the matrix optimizer whose update was timed.
        about: What else a file says of itself (device, dtype, versions, date, method); values that
            JSON can hold.

    Raises:
        ValueError: If an entry is not positive and finite.
    """

    seconds: Mapping[Shape, float]
    source: str
    algorithm: str = "muon"
    about: Mapping[str, Any] = field(default_factory=dict)

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
            raise ValueError(self._missing([matrix])) from None

    def check(self, matrices: Iterable[Matrix], algorithm: str = "muon") -> None:
        """Check that the table serves a job.

        Args:
            matrices: All that are to be assigned.
            algorithm: Name of the job's matrix optimizer.

        Raises:
            ValueError: It is for another algorithm, or lacks a shape; the message names table,
                matrix and shape, and the command that measures what is needed.
        """
        if algorithm != self.algorithm:
            raise ValueError(
                f"the cost table ({self.source}) is for algorithm '{self.algorithm}', but the job "
                f"has '{algorithm}'; use cost 'measured', or a table of dmuon costs --algorithm "
                f"{algorithm}"
            )
        every = list(matrices)
        if any(matrix.shape not in self.seconds for matrix in every):
            raise ValueError(self._missing(every))

    def _missing(self, matrices: Sequence[Matrix]) -> str:
        lacking = [matrix for matrix in matrices if matrix.shape not in self.seconds]
        first, others = lacking[0], {matrix.shape for matrix in lacking} - {lacking[0].shape}
        more = f" (and for {len(others)} more)" if others else ""
        shapes = ",".join(f"{r}x{c}" for r, c in sorted({matrix.shape for matrix in matrices}))
        return (
            f"the cost table ({self.source}) has no entry for {first.name} of shape {first.rows} x "
            f"{first.columns}{more}; use cost 'measured' or 'model', or make a table with "
            f"dmuon costs --shapes {shapes} --output costs.json"
        )

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
        # One line per shape: a table under version control shows what changed.
        entries = [
            json.dumps({"rows": rows, "columns": columns, "seconds": seconds})
            for (rows, columns), seconds in self.seconds.items()
        ]
        head = {
            "version": FILE_VERSION,
            "algorithm": self.algorithm,
            "source": self.source,
            "about": dict(self.about),
        }
        text = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}")
        body = ",\n  ".join(entries)
        target = Path(path)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(f'{text},\n "seconds": [\n  {body}\n ]\n}}\n')
            # mkstemp's 0600 would hide the table from others who run the job.
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise

    @classmethod
    def load(cls, name: str | os.PathLike[str]) -> CostTable:
        """Read a table that `save` wrote; the numbers are the same to the last bit.

        Args:
            name: Of a table that comes with the package (`shipped_tables`), or a path: what has a
                folder or ends in .json.

        Raises:
            ValueError: There is no such table, or the file is none; the message names it.
            OSError: The file cannot be read.
        """
        shown = os.fspath(name)
        path = Path(shown)
        if is_table_name(shown):
            path = TABLES_FOLDER / f"{shown}.json"
            if not path.is_file():
                raise ValueError(_unknown(shown))
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            version = data["version"]
            if version == FILE_VERSION:
                table = {_shape(e): _number(e["seconds"]) for e in data["seconds"]}
                about = dict(data["about"])
                return cls(table, str(data["source"]), str(data["algorithm"]), about)
        except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"{shown} is not a cost table: {error!r}") from error
        raise ValueError(
            f"{shown} is a cost table of version {version}, not {FILE_VERSION}; "
            "dmuon costs writes a new one"
        )


def _shape(entry: Mapping[str, Any]) -> Shape:
    rows, columns = entry["rows"], entry["columns"]
    if type(rows) is not int or type(columns) is not int:
        raise ValueError(f"rows and columns must be whole numbers, not {rows!r} and {columns!r}")
    return rows, columns


def _number(value: object) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"seconds must be a number, not {value!r}")
    seconds = float(value)  # type: ignore[arg-type]
    if seconds > _MOST_SECONDS:
        raise ValueError(f"seconds of one matrix are at most {_MOST_SECONDS:.0f}, not {value!r}")
    return seconds


def shipped_tables() -> tuple[str, ...]:
    """Return the names of the tables that come with the package, sorted."""
    return tuple(sorted(path.stem for path in TABLES_FOLDER.glob("*.json")))


def is_table_name(text: str) -> bool:
    """Whether `CostTable.load` takes it for the name of a shipped table, not for a path."""
    return not text.endswith(".json") and os.path.basename(text) == text


def _unknown(name: str) -> str:
    known = ("measured", "model", *shipped_tables())
    known = tuple(x for x in known if x != name)  # "measured" is a job's, and no table
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean '{close[0]}'?" if close else ";"
    return f"no cost table '{name}'{hint} expected {', '.join(known)} or the path of a .json file"


def model_cost(
    shapes: Iterable[Shape], flops: Callable[[int, int], float], algorithm: str = "muon"
) -> CostTable:
    """Return a table from a formula, for planning without a device.

    Operations over the rate of a fast device, plus a fixed overhead for launches. It ranks shapes
    plausibly; it predicts no real device.

    Args:
        shapes: Shapes, repeats allowed.
        flops: Takes rows and columns, returns the floating-point operations of an update.
        algorithm: Name of the matrix optimizer they are of.
    """
    table = {
        shape: MODEL_OVERHEAD_SECONDS + flops(*shape) / MODEL_FLOPS_PER_SECOND
        for shape in set(shapes)
    }
    return CostTable(table, "model", algorithm)


def measure(
    shapes: Iterable[Shape], run: Callable[[int, int], float], algorithm: str = "muon"
) -> CostTable:
    """Return a table from one measurement per distinct shape.

    Args:
        shapes: Shapes, repeats allowed.
        run: Takes rows and columns, returns seconds. It is called in ascending order of shapes, so
            that ranks which measure together measure the same thing at the same time.
        algorithm: Name of the matrix optimizer that is measured.
    """
    distinct = sorted({(int(rows), int(columns)) for rows, columns in shapes})
    return CostTable({shape: run(*shape) for shape in distinct}, "measured", algorithm)


def median(tables: Sequence[CostTable]) -> CostTable:
    """Return the median per shape over the tables of all ranks.

    Noise on one rank then hardly moves the assignment. With an even number of tables the median is
    the mean of the middle two.

    Raises:
        ValueError: If there is no table, or the tables list different shapes or algorithms.
    """
    if not tables:
        raise ValueError("median() needs at least one cost table")
    first = tables[0]
    for index, table in enumerate(tables):
        different = sorted(first.seconds.keys() ^ table.seconds.keys())
        if different:
            raise ValueError(
                f"cost tables 0 and {index} list different shapes: {different[0]} is in one only"
            )
        if table.algorithm != first.algorithm:
            raise ValueError(
                f"cost tables 0 and {index} are for different algorithms: '{first.algorithm}' and "
                f"'{table.algorithm}'"
            )
    values = {shape: statistics.median(t.seconds[shape] for t in tables) for shape in first.seconds}
    return CostTable(values, first.source, first.algorithm)
