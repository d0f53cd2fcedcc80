"""Owner assignment: greedy longest-processing-time with layer spreading and a byte cap.

Where the method leaves a point open, this is what `assign` does:

- Layer rule against byte cap: the layer rule is hard and the cap is soft. A unit that fits on no
  rank without a unit of its layer goes over the cap on the lightest of those; each overrun is
  reported.
- More units in a layer than ranks: the candidates are the ranks with the fewest units of the layer.
- Units without matrices (elementwise parameters of a layer without small matrices) have neither
  time nor bytes, so neither can place them: they go where such units have the fewest elements so
  far, then to the fewest bytes. By time, or by all bytes, most of them would land on one rank.
- Dealing ("round_robin") deals units without matrices last.
- On a mesh the columns of a layer's units need not differ, and a column has no cap of its own.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from .cost import CostTable
from .mesh import OwnerMesh
from .units import Unit

Method = Literal["balanced", "round_robin", "elements"]
Enumeration = Literal["rows", "columns"]

_Array: TypeAlias = np.ndarray[Any, Any]

# Bytes are reported as those of the FP32 masters; in the cap itself the element size cancels.
BYTES_PER_ELEMENT = 4


@dataclass(frozen=True, slots=True)
class Overrun:
    """A unit that took its owner over the byte cap.

    Attributes:
        rank: The owner.
        layer: Index of the unit's layer.
        unit: Name of the unit.
        bytes: FP32 bytes of the owner's matrices once it has the unit.
        cap: The cap in the same bytes.
    """

    rank: int
    layer: int
    unit: str
    bytes: int
    cap: int


@dataclass(frozen=True)
class Assignment:
    """An owner for every unit.

    Attributes:
        units: The units, in the order given to `assign`.
        owners: Rank of each unit.
        mesh: The ranks.
        cost: The table that judges the assignment, and that "balanced" used.
        overruns: Units that exceeded the byte cap, in the order they were placed.
    """

    units: tuple[Unit, ...]
    owners: tuple[int, ...]
    mesh: OwnerMesh
    cost: CostTable
    overruns: tuple[Overrun, ...] = ()

    def __post_init__(self) -> None:
        if len(self.owners) != len(self.units):
            raise ValueError(f"{len(self.units)} units need as many owners, not {self.owners}")
        for unit, owner in zip(self.units, self.owners, strict=True):
            if not 0 <= owner < self.mesh.size:
                raise ValueError(f"owner {owner} of {unit.name} is outside the {self.mesh} mesh")

    @property
    def matrix_owners(self) -> dict[str, int]:
        """Owner by matrix name."""
        return {m.name: o for u, o in self._pairs() for m in u.matrices}

    @property
    def parameter_owners(self) -> dict[str, int]:
        """Owner by name, of the elementwise parameters that are owned."""
        return {name: o for u, o in self._pairs() for name in u.parameters}

    @property
    def rank_seconds(self) -> tuple[float, ...]:
        """Orthogonalization seconds per rank, added in unit order."""
        seconds = [0.0] * self.mesh.size
        for unit, owner in self._pairs():
            seconds[owner] += self.cost.unit_seconds(unit)
        return tuple(seconds)

    @property
    def rank_numel(self) -> tuple[int, ...]:
        """Matrix elements per rank."""
        numel = [0] * self.mesh.size
        for unit, owner in self._pairs():
            numel[owner] += unit.numel
        return tuple(numel)

    @property
    def rank_matrices(self) -> tuple[int, ...]:
        """Number of matrices per rank."""
        matrices = [0] * self.mesh.size
        for unit, owner in self._pairs():
            matrices[owner] += len(unit.matrices)
        return tuple(matrices)

    def digest(self) -> str:
        """Return 64 hex digits that differ if owners, units, matrix tables, mesh or costs differ.

        Ranks compare it once. Labels that decide nothing (`cost.source`) are left out.
        """
        tables: list[Any] = [[self.mesh.rows, self.mesh.columns]]
        for unit, owner in self._pairs():
            matrices = [
                [m.parameter, m.index, m.rows, m.columns, m.offset, m.blocks, m.block_stride]
                for m in unit.matrices
            ]
            tables.append([owner, unit.layer, matrices, unit.parameters, unit.rider_numel])
        costs = [[*shape, seconds.hex()] for shape, seconds in self.cost.seconds.items()]
        return hashlib.sha256(json.dumps([tables, costs]).encode()).hexdigest()

    def _pairs(self) -> zip[tuple[Unit, int]]:
        return zip(self.units, self.owners, strict=True)


def assign(
    units: Sequence[Unit],
    mesh: OwnerMesh,
    cost: CostTable,
    *,
    method: Method = "balanced",
    byte_cap: float | None = 0.1,
    spread_layers: bool = True,
    column_first: bool = True,
    enumeration: Enumeration = "rows",
) -> Assignment:
    """Choose an owner for every unit.

    "balanced" takes units by decreasing time, then elements, then name. Each goes to the candidate
    (a rank without a unit of its layer) that stays within the byte cap and has the least time;
    on a mesh, the least time of its column comes first. If every candidate would exceed the cap,
    the one with the fewest bytes gets it.

    Args:
        units: From `build_units`.
        mesh: The ranks. One row or one column gives the plain one-dimensional greedy.
        cost: Seconds per shape; must cover every matrix.
        method: "balanced"; "elements", the same with elements in place of seconds; or
            "round_robin", which deals units out in order and looks at nothing else.
        byte_cap: No rank should hold more than `1 + byte_cap` times the mean bytes; None for no
            cap. Soft: overruns are listed in the result.
        spread_layers: Whether the units of a layer go to different ranks.
        column_first: Whether columns are balanced before ranks. False is for comparisons.
        enumeration: Order of ranks for ties and dealing: row by row (by rank number) or column by
            column. "columns" is for comparisons with unbalanced rails.

    Raises:
        ValueError: If an option has an unknown or negative value, or a shape has no cost.
    """
    _check_choice("method", method, get_args(Method))
    _check_choice("enumeration", enumeration, get_args(Enumeration))
    cap = _cap_numel(units, mesh, byte_cap)
    seconds = [cost.unit_seconds(unit) for unit in units]
    loads = [float(unit.numel) for unit in units] if method == "elements" else seconds
    ranks = _Ranks(mesh, cap, spread_layers, column_first, enumeration)
    # Units without matrices are dealt last: they must not shift the deal of the others.
    order = sorted(range(len(units)), key=lambda i: not units[i].matrices)
    if method != "round_robin":
        order.sort(key=lambda i: (-loads[i], -units[i].numel, units[i].name))
    owners = [0] * len(units)
    overruns = []
    for turn, i in enumerate(order):
        slot = turn % mesh.size if method == "round_robin" else ranks.choose(units[i])
        owners[i] = ranks.place(slot, units[i], loads[i])
        numel = ranks.numel_of(slot)
        if cap is not None and units[i].numel and numel > cap:
            size = BYTES_PER_ELEMENT
            overruns.append(
                Overrun(owners[i], units[i].layer, units[i].name, numel * size, cap * size)
            )
    return Assignment(tuple(units), tuple(owners), mesh, cost, tuple(overruns))


class _Ranks:
    """Loads of all ranks while units are placed; arrays are indexed in enumeration order."""

    def __init__(
        self,
        mesh: OwnerMesh,
        cap: int | None,
        spread_layers: bool,
        column_first: bool,
        enumeration: Enumeration,
    ) -> None:
        grid = np.arange(mesh.size).reshape(mesh.rows, mesh.columns)
        self._ranks = (grid if enumeration == "rows" else grid.T).reshape(-1)
        self._columns = self._ranks % mesh.columns
        self._cap = cap
        self._spread_layers = spread_layers
        self._column_first = column_first
        self._load = np.zeros(mesh.size)
        # Load of the whole column, kept per rank so that it can be compared like the others.
        self._column_load = np.zeros(mesh.size)
        self._numel = np.zeros(mesh.size, dtype=np.int64)
        self._rider_numel = np.zeros(mesh.size, dtype=np.int64)
        self._layer_units: dict[int, _Array] = {}

    def choose(self, unit: Unit) -> int:
        """Return the slot that the greedy gives the unit to."""
        slots = np.arange(len(self._ranks))
        if self._spread_layers:
            slots = _smallest(slots, self._in_layer(unit.layer))
        loads: list[_Array] = (
            [self._column_load, self._load] if self._column_first else [self._load]
        )
        if not unit.matrices:
            keys = [self._rider_numel, self._numel, *loads]
        else:
            keys = loads
            if self._cap is not None:
                fits = slots[self._numel[slots] + unit.numel <= self._cap]
                if len(fits):
                    slots = fits
                else:
                    keys = [self._numel, *loads]
        for key in keys:
            slots = _smallest(slots, key)
        return int(slots[0])

    def place(self, slot: int, unit: Unit, load: float) -> int:
        """Give the unit to a slot and return its rank."""
        self._in_layer(unit.layer)[slot] += 1
        self._load[slot] += load
        self._column_load[self._columns == self._columns[slot]] += load
        self._numel[slot] += unit.numel
        if not unit.matrices:
            self._rider_numel[slot] += unit.rider_numel
        return int(self._ranks[slot])

    def numel_of(self, slot: int) -> int:
        """Return the matrix elements at a slot."""
        return int(self._numel[slot])

    def _in_layer(self, layer: int) -> _Array:
        if layer not in self._layer_units:
            self._layer_units[layer] = np.zeros(len(self._ranks), dtype=np.int64)
        return self._layer_units[layer]


def _smallest(slots: _Array, key: _Array) -> _Array:
    """Return the slots, in order, at which the key is smallest."""
    values = key[slots]
    kept: _Array = slots[values == values.min()]
    return kept


def _cap_numel(units: Sequence[Unit], mesh: OwnerMesh, byte_cap: float | None) -> int | None:
    """Return the most matrix elements a rank should hold; exact, so that "at most" is inclusive."""
    if byte_cap is None:
        return None
    if not (math.isfinite(byte_cap) and byte_cap >= 0):
        raise ValueError(f"byte_cap must be 0 or more (or None for no cap), not {byte_cap}")
    total = sum(unit.numel for unit in units)
    # The decimal that was written: a binary 0.1 would put the cap a hair off.
    return math.floor((1 + Fraction(repr(float(byte_cap)))) * total / mesh.size)


def _check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        close = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.4)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise ValueError(f"{option} must be one of {list(choices)}, not '{value}'{hint}")
