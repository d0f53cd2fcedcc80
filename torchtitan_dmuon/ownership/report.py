"""What an assignment means for ranks, rails and layers, as numbers and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .assign import BYTES_PER_ELEMENT, Assignment, Overrun
from .units import Layer, Unit

# Elements as they travel on a rail: the leaders' BF16 copies.
RAIL_BYTES_PER_ELEMENT = 2

# Above this many ranks the table shows the extremes instead of every rank.
TABLE_RANKS = 16
TABLE_OVERRUNS = 8

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What one rank owns.

    Attributes:
        rank: The rank.
        units: Units, those without matrices included.
        matrices: Matrices.
        seconds: Orthogonalization seconds per step.
        numel: Matrix elements.
        rider_numel: Elements of the elementwise parameters that ride along.
    """

    rank: int
    units: int
    matrices: int
    seconds: float
    numel: int
    rider_numel: int


@dataclass(frozen=True, slots=True)
class ColumnLoad:
    """What the owners of one column publish over their rail in a step.

    Attributes:
        column: The column.
        parameters: Tensors: every matrix and every elementwise parameter counts once.
        matrices: Matrices among them.
        seconds: Orthogonalization seconds of the column's ranks together.
        bytes: BF16 bytes of all tensors.
        largest_bytes: BF16 bytes of the largest tensor.
    """

    column: int
    parameters: int
    matrices: int
    seconds: float
    bytes: int
    largest_bytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """An assignment in numbers. Ratios are 1.0 where there is nothing to balance.

    Attributes:
        mesh: Rows (nodes) and columns (GPUs per node).
        ranks: Number of ranks.
        layers: Layers that own something.
        units: Units with matrices.
        rider_units: Units without matrices.
        matrices: Matrices.
        numel: Matrix elements.
        rider_numel: Elements of owned elementwise parameters.
        cost_source: Where the seconds come from.
        busiest_seconds: Seconds of the busiest rank.
        mean_seconds: Mean seconds over all ranks.
        bound_seconds: No assignment makes the busiest rank faster: the largest of mean, longest
            unit, and what must share a rank because there are more units than ranks.
        busiest_over_mean: Balance of time.
        busiest_over_bound: Balance of time, given that units are not divided.
        heaviest_over_mean: Balance of matrix bytes, mean over all ranks (what the cap limits).
        window_over_mean: The same for all owned bytes, elementwise parameters included, with the
            mean over the ranks that own something.
        worst_layer: Index of the layer whose heaviest owner sends the most relative to the
            layer's largest unit; -1 without matrices.
        worst_layer_name: Its name.
        worst_layer_ratio: That ratio in matrix bytes; 1.0 if no owner has two units of a layer.
        idle_ranks: Ranks that own nothing.
        heaviest_rail_over_mean: Balance of published bytes over the columns.
        rank_loads: One row per rank.
        column_loads: One row per column.
        largest_unit_numel: Matrix elements of the largest unit.
        overruns: Units over the byte cap.
        overrun_layers: Name of each overrun's layer.
    """

    mesh: tuple[int, int]
    ranks: int
    layers: int
    units: int
    rider_units: int
    matrices: int
    numel: int
    rider_numel: int
    cost_source: str
    busiest_seconds: float
    mean_seconds: float
    bound_seconds: float
    busiest_over_mean: float
    busiest_over_bound: float
    heaviest_over_mean: float
    window_over_mean: float
    worst_layer: int
    worst_layer_name: str
    worst_layer_ratio: float
    idle_ranks: int
    heaviest_rail_over_mean: float
    rank_loads: tuple[RankLoad, ...]
    column_loads: tuple[ColumnLoad, ...]
    largest_unit_numel: int
    overruns: tuple[Overrun, ...]
    overrun_layers: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain dicts, tuples, numbers and strings, ready for JSON."""
        return asdict(self)

    def table(self) -> str:
        """Return a readable ASCII table; ranks one by one up to 16, else their extremes."""
        return "\n".join([*self._head(), "", *self._ranks(), *self._rails(), *self._overruns()])

    def _head(self) -> list[str]:
        numel = self.numel + self.rider_numel
        mesh = f"{self.mesh[0]} x {self.mesh[1]}"
        riders = f" (+ {self.rider_units} without matrices)" if self.rider_units else ""
        lines = [
            f"{self.matrices} matrices in {self.units} units{riders} of {self.layers} layers, "
            f"{numel / 1e6:.1f}M elements, on {self.ranks} ranks ({mesh})",
            f"time   busiest {self.busiest_seconds * 1e3:.3f} ms = {self.busiest_over_mean:.3f} "
            f"of the mean, {self.busiest_over_bound:.3f} of the lower bound; "
            f"costs: {self.cost_source}",
            f"bytes  heaviest {self.heaviest_over_mean:.3f} of the mean; "
            f"over the cap: {_count(len(self.overruns), 'unit')}",
        ]
        if self.worst_layer >= 0:
            lines.append(
                f"layers worst {self.worst_layer_name}: heaviest owner sends "
                f"{self.worst_layer_ratio:.3f} of the largest unit"
            )
        if self.idle_ranks:
            lines.append(f"idle   {_count(self.idle_ranks, 'rank')} without a unit")
        return lines

    def _ranks(self) -> list[str]:
        header = ("rank", "units", "matrices", "ms", "matrix MiB", "other KiB")
        loads = self.rank_loads
        if self.ranks <= TABLE_RANKS:
            return _columns(header, [(str(load.rank), *_rank_cells(load)) for load in loads])
        # Of equal ranks the lowest is shown.
        by_time = sorted(loads, key=lambda load: load.seconds)
        rows = [
            (f"{label} ({load.rank})", *_rank_cells(load))
            for label, load in (
                ("busiest", max(loads, key=lambda load: load.seconds)),
                ("median", by_time[len(loads) // 2]),
                ("least busy", by_time[0]),
                ("heaviest", max(loads, key=lambda load: load.numel)),
                ("lightest", min(loads, key=lambda load: load.numel)),
            )
        ]
        return _columns(header, rows)

    def _rails(self) -> list[str]:
        rows, columns = self.mesh
        if rows == 1 or columns == 1:
            return []
        lines = ["", f"rails  heaviest {self.heaviest_rail_over_mean:.3f} of the mean"]
        if columns <= TABLE_RANKS:
            header = ("rail", "tensors", "matrices", "ms", "MiB", "largest MiB")
            lines += _columns(header, [_column_cells(load) for load in self.column_loads])
        return lines

    def _overruns(self) -> list[str]:
        if not self.overruns:
            return []
        largest, cap = self.largest_unit_numel * BYTES_PER_ELEMENT, self.overruns[0].cap
        alone = f" (the largest unit alone is {largest / _MIB:.1f} MiB)" if largest > cap else ""
        lines = ["", f"over the byte cap{alone}:"]
        pairs = list(zip(self.overruns, self.overrun_layers, strict=True))
        for overrun, layer in pairs[:TABLE_OVERRUNS]:
            lines.append(
                f"  rank {overrun.rank}, layer {layer}: {overrun.unit} makes "
                f"{overrun.bytes / _MIB:.1f} MiB of {overrun.cap / _MIB:.1f}"
            )
        if len(pairs) > TABLE_OVERRUNS:
            lines.append(f"  and {len(pairs) - TABLE_OVERRUNS} more")
        return lines


def summarize(assignment: Assignment, layers: Sequence[Layer]) -> Summary:
    """Return the balance of an assignment over ranks, columns and layers.

    Args:
        assignment: From `assign`.
        layers: The layers that its units were built from.

    Raises:
        ValueError: If a unit's layer is not among them.
    """
    units, mesh = assignment.units, assignment.mesh
    for unit in units:
        if not 0 <= unit.layer < len(layers):
            raise ValueError(f"unit {unit.name} is of layer {unit.layer}, of {len(layers)} given")
    loads = _rank_loads(assignment)
    rails = _column_loads(assignment, layers)
    seconds = [load.seconds for load in loads]
    windows = [load.numel + load.rider_numel for load in loads if load.units]
    bound = _bound(assignment)
    worst, ratio = _worst_layer(assignment)
    return Summary(
        mesh=(mesh.rows, mesh.columns),
        ranks=mesh.size,
        layers=len({unit.layer for unit in units}),
        units=sum(1 for unit in units if unit.matrices),
        rider_units=sum(1 for unit in units if not unit.matrices),
        matrices=sum(len(unit.matrices) for unit in units),
        numel=sum(unit.numel for unit in units),
        rider_numel=sum(unit.rider_numel for unit in units),
        cost_source=assignment.cost.source,
        busiest_seconds=max(seconds),
        mean_seconds=sum(seconds) / mesh.size,
        bound_seconds=bound,
        busiest_over_mean=_over_mean(seconds),
        busiest_over_bound=max(seconds) / bound if bound else 1.0,
        heaviest_over_mean=_over_mean([load.numel for load in loads]),
        window_over_mean=_over_mean(windows),
        worst_layer=worst,
        worst_layer_name=layers[worst].name if worst >= 0 else "",
        worst_layer_ratio=ratio,
        idle_ranks=sum(1 for load in loads if not load.units),
        heaviest_rail_over_mean=_over_mean([rail.bytes for rail in rails]),
        rank_loads=loads,
        column_loads=rails,
        largest_unit_numel=max((unit.numel for unit in units), default=0),
        overruns=assignment.overruns,
        overrun_layers=tuple(layers[overrun.layer].name for overrun in assignment.overruns),
    )


def _rank_loads(assignment: Assignment) -> tuple[RankLoad, ...]:
    units = [0] * assignment.mesh.size
    riders = [0] * assignment.mesh.size
    for unit, owner in zip(assignment.units, assignment.owners, strict=True):
        units[owner] += 1
        riders[owner] += unit.rider_numel
    rows = zip(
        units,
        assignment.rank_matrices,
        assignment.rank_seconds,
        assignment.rank_numel,
        riders,
        strict=True,
    )
    return tuple(RankLoad(rank, *row) for rank, row in enumerate(rows))


def _column_loads(assignment: Assignment, layers: Sequence[Layer]) -> tuple[ColumnLoad, ...]:
    mesh = assignment.mesh
    numel = {p.name: p.numel for layer in layers for p in layer.parameters}
    owned: list[list[Unit]] = [[] for _ in range(mesh.columns)]
    for unit, owner in zip(assignment.units, assignment.owners, strict=True):
        owned[mesh.column(owner)].append(unit)
    loads = []
    for column, units in enumerate(owned):
        matrices = [matrix for unit in units for matrix in unit.matrices]
        sizes = [matrix.numel for matrix in matrices]
        sizes += [numel[name] for unit in units for name in unit.parameters]
        loads.append(
            ColumnLoad(
                column=column,
                parameters=len(sizes),
                matrices=len(matrices),
                seconds=sum((assignment.cost.unit_seconds(unit) for unit in units), 0.0),
                bytes=RAIL_BYTES_PER_ELEMENT * sum(sizes),
                largest_bytes=RAIL_BYTES_PER_ELEMENT * max(sizes, default=0),
            )
        )
    return tuple(loads)


def _worst_layer(assignment: Assignment) -> tuple[int, float]:
    """Return the layer and ratio of heaviest owner to largest unit; the first layer of a tie."""
    owned: dict[int, dict[int, int]] = {}
    largest: dict[int, int] = {}
    for unit, owner in zip(assignment.units, assignment.owners, strict=True):
        if unit.numel:
            layer = owned.setdefault(unit.layer, {})
            layer[owner] = layer.get(owner, 0) + unit.numel
            largest[unit.layer] = max(largest.get(unit.layer, 0), unit.numel)
    if not owned:
        return -1, 1.0
    ratios = {layer: max(ranks.values()) / largest[layer] for layer, ranks in owned.items()}
    worst = min(ratios, key=lambda layer: (-ratios[layer], layer))
    return worst, ratios[worst]


def _bound(assignment: Assignment) -> float:
    """Return a lower bound on the busiest rank's seconds over all assignments.

    The mean; and of the `k * ranks + 1` longest units, `k + 1` must share a rank, so the sum of
    the shortest `k + 1` of those. `k = 0` is the longest unit.
    """
    times = sorted((assignment.cost.unit_seconds(unit) for unit in assignment.units), reverse=True)
    ranks = assignment.mesh.size
    bound = sum(times) / ranks
    for k in range((len(times) - 1) // ranks + 1 if times else 0):
        longest = times[: k * ranks + 1]
        bound = max(bound, sum(longest[-(k + 1) :]))
    return bound


def _over_mean(values: Sequence[float]) -> float:
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


def _rank_cells(load: RankLoad) -> tuple[str, ...]:
    return (
        str(load.units),
        str(load.matrices),
        f"{load.seconds * 1e3:.3f}",
        f"{load.numel * BYTES_PER_ELEMENT / _MIB:.1f}",
        f"{load.rider_numel * BYTES_PER_ELEMENT / 1024:.1f}",
    )


def _column_cells(load: ColumnLoad) -> tuple[str, ...]:
    return (
        str(load.column),
        str(load.parameters),
        str(load.matrices),
        f"{load.seconds * 1e3:.3f}",
        f"{load.bytes / _MIB:.1f}",
        f"{load.largest_bytes / _MIB:.1f}",
    )


def _columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [header, *rows]
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
