"""Assignment units: what gets one owner."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from .matrices import Matrix, Piece, segments

# A matrix with strictly fewer elements is small: it shares an owner with the others of its layer.
SMALL_MATRIX_NUMEL = 5_000_000

ExpertUnits = Literal["each", "fused", "small"]


@dataclass(frozen=True, slots=True)
class LayerParameter:
    """A parameter of a layer.

    Attributes:
        name: Fully qualified name.
        shape: Full (unsharded) shape.
        matrices: Its matrices, from `MatrixSpec.matrices`; empty if it is updated elementwise.
    """

    name: str
    shape: tuple[int, ...]
    matrices: tuple[Matrix, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layer:
    """The owned parameters of one FSDP wrapping unit.

    Attributes:
        name: Name of the module, for reports and errors.
        parameters: Its parameters, in the model's parameter order.
    """

    name: str
    parameters: tuple[LayerParameter, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """Matrices and small tensors of one layer that get one owner.

    Attributes:
        layer: Index of the layer.
        matrices: Its matrices, in parameter order; empty if the layer has no small matrix that its
            elementwise parameters could ride with.
        parameters: Names of the elementwise parameters that ride along.
        rider_numel: Elements of those parameters. They are gathered, reduced and stored with the
            unit, but count neither in its time nor in its bytes for the cap.
    """

    layer: int
    matrices: tuple[Matrix, ...]
    parameters: tuple[str, ...] = ()
    rider_numel: int = 0

    @property
    def name(self) -> str:
        """Name of the first matrix, or of the first parameter if there is no matrix."""
        return self.matrices[0].name if self.matrices else self.parameters[0]

    @property
    def numel(self) -> int:
        """Elements of the matrices: the unit's bytes in the sense of the byte cap."""
        return sum(matrix.numel for matrix in self.matrices)


def build_units(
    layers: Sequence[Layer],
    *,
    small_matrix_numel: int = SMALL_MATRIX_NUMEL,
    expert_units: ExpertUnits = "each",
) -> tuple[Unit, ...]:
    """Cut layers into assignment units, in the order of the layers and of their parameters.

    - Each large matrix is a unit, and so is each matrix of a stack (an expert), however small.
    - All small matrices of a layer are one unit, together with the layer's elementwise parameters
      (norm gains, biases, scalars).
    - Interleaved matrices share a contiguous range and stay in one unit. They count as small if
      each of them is: the layout of a fused weight does not change which matrices are small.
    - Left open by the method: a layer without small matrices. Its elementwise parameters are then
      a unit of their own, without time and bytes; `assign` spreads such units over the ranks.

    Args:
        layers: Layers in forward order. Layers without parameters give no unit.
        small_matrix_numel: A matrix with strictly fewer elements is small.
        expert_units: What becomes of the matrices of a stack. "each": a unit each. The others are
            for comparison (paper C.5, the merged scheme, which can be read in two ways): "fused":
            all of one stack are a unit; "small": they have no special treatment, so those below the
            threshold belong to the layer's small unit.

    Raises:
        ValueError: If a parameter's name occurs twice, or an option has a bad value.
    """
    if small_matrix_numel < 0:
        raise ValueError(f"small_matrix_numel must be 0 or more, not {small_matrix_numel}")
    if expert_units not in get_args(ExpertUnits):
        raise ValueError(f"expert_units: expected {get_args(ExpertUnits)}, got {expert_units!r}")
    _check_names(layers)
    units: list[Unit] = []
    for index, layer in enumerate(layers):
        units += _layer_units(index, layer, small_matrix_numel, expert_units)
    return tuple(units)


def _layer_units(
    index: int, layer: Layer, small_matrix_numel: int, expert_units: ExpertUnits
) -> list[Unit]:
    small: list[Matrix] = []
    riders = [p for p in layer.parameters if not p.matrices]
    # Position in parameter order of each unit's first member, which orders the units.
    placed: list[tuple[int, Unit]] = []
    small_at = rider_at = -1
    position = 0
    for parameter in layer.parameters:
        position += 1
        if not parameter.matrices and rider_at < 0:
            rider_at = position
        stacked = any(m.stacked for m in parameter.matrices)
        if stacked and expert_units == "fused":
            placed.append((position, Unit(index, parameter.matrices)))
            continue
        for piece in segments(parameter.matrices):
            position += 1
            if _is_small(piece, small_matrix_numel, expert_units):
                small_at = position if not small else small_at
                small += piece.matrices
            else:
                placed.append((position, Unit(index, piece.matrices)))
    if small or riders:
        rest = Unit(
            index, tuple(small), tuple(p.name for p in riders), sum(p.numel for p in riders)
        )
        placed.append((small_at if small else rider_at, rest))
    return [unit for _, unit in sorted(placed, key=lambda item: item[0])]


def _is_small(piece: Piece, small_matrix_numel: int, expert_units: ExpertUnits) -> bool:
    special = expert_units == "each"
    return all(not (special and m.stacked) and m.numel < small_matrix_numel for m in piece.matrices)


def _check_names(layers: Iterable[Layer]) -> None:
    seen: dict[str, str] = {}
    for layer in layers:
        for parameter in layer.parameters:
            if parameter.name in seen:
                raise ValueError(
                    f"parameter '{parameter.name}' is in layer '{layer.name}' and in layer "
                    f"'{seen[parameter.name]}'; a parameter has one owner, so name it once"
                )
            seen[parameter.name] = layer.name
