"""Where each parameter of a model with owners goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch.nn as nn
from torch.distributed.tensor import DTensor

from torchtitan_dmuon.optim.matrix_optimizer import MatrixOptimizer
from torchtitan_dmuon.optim.report import RouteRow, RoutingReport
from torchtitan_dmuon.runtime.group import Group
from torchtitan_dmuon.runtime.runtime import Runtime
from torchtitan_dmuon.runtime.site import canonical_name

Place = tuple[Group, int]
"""A group, and the index of a parameter in it."""


def routing_report(
    runtime: Runtime,
    algorithm: type[MatrixOptimizer],
    places: Mapping[nn.Parameter, tuple[str, Place | None]],
    options: Mapping[nn.Parameter, dict[str, Any]],
) -> RoutingReport:
    """Return the routes of all parameters, in the model's order.

    Args:
        runtime: Of the model.
        algorithm: Of the matrix route.
        places: Canonical name of each parameter, and where it is owned, if it is.
        options: The parameter group of each that trains.
    """
    rows = [_row(runtime, algorithm, p, *at, options.get(p)) for p, at in places.items()]
    names = [canonical_name(name) for name, _ in runtime.model.named_parameters()]
    order = {name: i for i, name in enumerate(names)}
    return RoutingReport(tuple(sorted(rows, key=lambda row: order[row.name])))


def _row(
    runtime: Runtime,
    algorithm: type[MatrixOptimizer],
    parameter: nn.Parameter,
    name: str,
    place: Place | None,
    group: dict[str, Any] | None,
) -> RouteRow:
    matrices = place[0].parameters[place[1]].matrices if place else ()
    if place is None:
        holder = "sharded" if isinstance(parameter, DTensor) else "local"
    else:
        mine = [s for s in place[0].layout.segments if s.parameter == place[1]]
        mesh = runtime.assignment.mesh
        owners = sorted({mesh.rank(s.row, s.column) for s in mine if s.row >= 0})
        holder = ",".join(map(str, owners)) if owners else "sharded"
    rates: tuple[float, ...] = ()
    if group is not None and matrices:
        rule = algorithm.of(group)
        rates = tuple(rule.adjusted_lr(m.rows, m.columns) for m in matrices)
    elif group is not None:
        rates = (float(group["lr"]),)
    route: Literal["matrix", "adamw", "frozen"] = "frozen" if group is None else group["route"]
    return RouteRow(name, tuple(parameter.shape), route, holder, len(matrices), rates)
