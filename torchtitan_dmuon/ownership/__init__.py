"""Planning of owners: matrices, units, costs, assignment. Pure: no process group, no device."""

from .assign import BYTES_PER_ELEMENT, Assignment, Overrun, assign
from .cost import CostTable, is_table_name, measure, median, model_cost, shipped_tables
from .matrices import Matrix, MatrixSpec, Piece, segments
from .mesh import OwnerMesh
from .report import ColumnLoad, RankLoad, Summary, summarize
from .units import SMALL_MATRIX_NUMEL, ExpertUnits, Layer, LayerParameter, Unit, build_units

__all__ = [
    "BYTES_PER_ELEMENT",
    "SMALL_MATRIX_NUMEL",
    "Assignment",
    "ColumnLoad",
    "CostTable",
    "ExpertUnits",
    "Layer",
    "LayerParameter",
    "Matrix",
    "MatrixSpec",
    "Overrun",
    "OwnerMesh",
    "Piece",
    "RankLoad",
    "Summary",
    "Unit",
    "assign",
    "build_units",
    "is_table_name",
    "measure",
    "median",
    "model_cost",
    "segments",
    "shipped_tables",
    "summarize",
]
