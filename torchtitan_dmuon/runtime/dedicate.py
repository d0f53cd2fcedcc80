"""`dedicate_params`: give every matrix of a model one owner."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_dmuon.arguments import expect, is_count, is_size
from torchtitan_dmuon.baselines.shards import ShardGroup
from torchtitan_dmuon.comm.c10d import C10dCommunicator
from torchtitan_dmuon.optim.matrix_optimizer import MatrixOptimizer, find
from torchtitan_dmuon.ownership import (
    SMALL_MATRIX_NUMEL,
    Assignment,
    CostTable,
    Layer,
    MatrixSpec,
    OwnerMesh,
    Summary,
    assign,
    build_units,
    measure,
    median,
    model_cost,
    summarize,
)
from torchtitan_dmuon.runtime.group import Group, Precision
from torchtitan_dmuon.runtime.layout import Layout, owner_layout, shard_layout
from torchtitan_dmuon.runtime.open_pool import open_pool
from torchtitan_dmuon.runtime.owner_group import OwnerGroup
from torchtitan_dmuon.runtime.runtime import Runtime
from torchtitan_dmuon.runtime.select import (
    ModulePredicate,
    ParameterPredicate,
    SelectedLayer,
    find_layers,
    select,
)
from torchtitan_dmuon.runtime.site import Site, each_site, make_site, sites_of
from torchtitan_dmuon.runtime.transport import (
    Communication,
    Mode,
    OpenCommunicator,
    open_communicator,
    uses_pool,
)

AssignmentMethod = Literal["balanced", "round_robin", "elements"]


@dataclass(frozen=True)
class Dedication:
    """What `dedicate_params` did.

    Attributes:
        runtime: The runtime of the model.
        assignment: Units and their owners.
    """

    runtime: Runtime
    assignment: Assignment

    @property
    def parameters(self) -> set[nn.Parameter]:
        """The owned parameters: what `fully_shard(..., ignored_params=)` must leave alone."""
        return self.runtime.owned_parameters()

    def summary(self) -> Summary:
        """Return the assignment's balance as data."""
        return summarize(self.assignment, self.runtime.layers)

    def table(self) -> str:
        """Return the assignment's balance as a printable table."""
        return self.summary().table()

    def memory_bytes(self) -> dict[str, int]:
        """Return this rank's bytes: masters, copies, gradients, gathered, unsynced."""
        return self.runtime.memory_bytes()


def dedicate_params(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    predicate: ParameterPredicate | None = None,
    replicate_mesh: DeviceMesh | None = None,
    hook_boundary_predicate: ModulePredicate | None = None,
    reshard_after_forward: bool = True,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    cast_forward_inputs: bool = True,
    matrix_specs: Mapping[str, MatrixSpec] | None = None,
    communication: Communication | OpenCommunicator = "c10d",
    mode: Mode = "owner",
    algorithm: str | type[MatrixOptimizer] | MatrixOptimizer = "muon",
    cost: str | CostTable = "measured",
    assignment: AssignmentMethod = "balanced",
    small_matrix_numel: int = SMALL_MATRIX_NUMEL,
    byte_cap: float | None = 0.1,
    prefetch_depth: int = 1,
    gradient_divide_factor: float | None = None,
    allocation_signatures: bool = True,
    timeout: timedelta | None = None,
) -> Dedication:
    """Give every matrix of `model` one owner, and shard its layers accordingly.

    Call it before `fully_shard`, which takes the rest of the model (embeddings, output head, final
    norm) and must leave the owned parameters alone:

        owned = dedicate_params(model, mesh)
        fully_shard(model, mesh=mesh, ignored_params=owned.parameters)
        optimizer = Muon(model, lr=0.02)

    (A `fully_shard` without `ignored_params` fails in torch: "FSDP does not support non-contiguous
    parameters".) The layers' weight matrices are gathered before a layer runs and freed after it;
    gradients are reduced to the owners in backward; `Muon` updates them there (paper sections 3 and
    4). The small tensors of a layer (norms, biases) ride along with its small matrices. The model's
    code, its parameter names and `requires_grad` stay as they are. Outside of forward and backward
    an owned parameter reads as NaN; `full_params` shows it. Collective over the mesh.

    Args:
        model: Not yet sharded; on the meta device too (then `to_empty`, and initialise in
            `full_params(..., writeback=True)`). Every rank must hold the same architecture; weights
            are taken from each matrix's owner (in mode "gather" from each row's shards).
        mesh: 1-D: the shard axis (FSDP). 2-D: (replicate, shard) as `fully_shard` takes it (HSDP; a
            shard axis of size 1 is DDP). None: one process, no communication.
        predicate: (canonical name, parameter) -> whether it holds matrices. None: 2-D weights and
            3-D stacks of them inside the layers; not embeddings, what is named like an output head
            or has an embedding's shape, or convolutions.
        replicate_mesh: 1-D mesh of the replicate axis, if `mesh` is the 1-D shard axis of HSDP.
        hook_boundary_predicate: (canonical name, module) -> whether it is a layer: what is
            gathered and reduced together. None: the items of the model's block list, see
            `find_layers`.
        reshard_after_forward: Whether layers are freed after forward and gathered again for
            backward (ZeRO-3), or kept until their backward is done (ZeRO-2).
        param_dtype: What layers compute with, and what is gathered and published. None: as it is.
        reduce_dtype: What gradients are summed in. None: `param_dtype`.
        cast_forward_inputs: Whether floating inputs of layers are cast to `param_dtype`.
        matrix_specs: Regular expression on names -> `MatrixSpec`, for parameters that hold several
            matrices (fused projections) or must be read flat (convolutions). First match wins.
        communication: "c10d": torch.distributed collectives. "operators": our kernels, from the
            first step after the second micro-batch on (paper C.1; see docs/operators.md). "auto":
            operators if every rank can, else c10d; the log says why. Or a function that opens a
            communicator, given the global rank at each (row, column), the device and the timeout.
        mode: "owner", or "gather" for the baseline: even shards, whole matrices gathered and
            orthogonalised on every rank in each step (paper D.2, line B).
        algorithm: The matrix optimizer that owners are balanced for: a name ("muon", "soap", ...;
            with the options' defaults), a class or, with options, an instance.
        cost: Seconds of an update per shape: "measured" on every rank (median), "model" (a
            formula, reproducible), or a table: the name of a shipped one ("h100"), the path of a
            JSON file that `dmuon costs` wrote, or a CostTable.
        assignment: "balanced"; "elements" and "round_robin" are for comparison.
        small_matrix_numel: Matrices with fewer elements share an owner within their layer.
        byte_cap: Excess over the mean bytes that a rank may own (0.1 = 10 percent); None: any.
        prefetch_depth: Layers gathered ahead of the running one, forward and backward.
        gradient_divide_factor: Gradients are the sum over ranks divided by this. None: the number
            of ranks.
        allocation_signatures: On operators, whether autograd's allocations are recognised, so that
            gradients are born in the pool (paper C.1); else they are copied there. Same bits.
        timeout: Limit of a communication operation. None: 30 minutes, as torch's own groups.

    Returns:
        Owned parameters, assignment and its balance.

    Raises:
        ValueError: nothing is selected, shapes and specs disagree, a bad value, or a cost table
            that is not there, is for another algorithm or lacks a shape.
        OSError: a cost table's file cannot be read.
        NotImplementedError: a selected parameter is a DTensor already.
        OperatorsRefused: communication is "operators" and a rank cannot use them; says why.
        RuntimeError: ranks computed different assignments or tables; both digests are named.
    """
    if sites_of(model):
        raise ValueError("dedicate_params was called on this model already")
    _check_arguments(
        mesh=mesh,
        replicate_mesh=replicate_mesh,
        predicate=predicate,
        hook_boundary_predicate=hook_boundary_predicate,
        reshard_after_forward=reshard_after_forward,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        cast_forward_inputs=cast_forward_inputs,
        communication=communication,
        mode=mode,
        algorithm=algorithm,
        cost=cost,
        assignment=assignment,
        small_matrix_numel=small_matrix_numel,
        byte_cap=byte_cap,
        prefetch_depth=prefetch_depth,
        gradient_divide_factor=gradient_divide_factor,
        allocation_signatures=allocation_signatures,
        timeout=timeout,
    )
    if isinstance(cost, str) and cost not in ("measured", "model"):
        cost = CostTable.load(cost)
    layers = select(model, find_layers(model, hook_boundary_predicate), predicate, matrix_specs)
    layers = [layer for layer in layers if layer.parameters or layer.borrowed]
    grid = _grid(mesh, replicate_mesh)
    device = _device(model, mesh)
    communicator = None
    if mesh is not None and mesh.size() * (replicate_mesh.size() if replicate_mesh else 1) > 1:
        communicator = open_communicator(
            communication, mode, grid, _local_device(mesh.device_type), timeout
        )
    planned = [layer.as_layer() for layer in layers]
    units = build_units(planned, small_matrix_numel=small_matrix_numel)
    rule = _rule(algorithm)
    table = _cost_table(cost, rule, planned, device, communicator)
    owner_mesh = OwnerMesh(len(grid), len(grid[0]))
    result = assign(units, owner_mesh, table, method=assignment, byte_cap=byte_cap)
    layouts = [
        owner_layout(i, layer, result) if mode == "owner" else shard_layout(layer, owner_mesh)
        for i, layer in enumerate(planned)
    ]
    divide = owner_mesh.size if gradient_divide_factor is None else gradient_divide_factor
    precisions = [_precision(layer, param_dtype, reduce_dtype) for layer in layers]
    settings = (mode, reshard_after_forward, prefetch_depth, divide, precisions, _shapes(layers))
    _agree(communicator, result, layouts, settings)
    kind = OwnerGroup if mode == "owner" else ShardGroup
    groups: list[Group] = [
        kind(x.name, x.parameters, layout, precision, communicator, device, 1 / divide)
        for x, layout, precision in zip(layers, layouts, precisions, strict=True)
    ]
    runtime = Runtime(
        model,
        _make_sites(model, layers, groups),
        [group for group in groups if group.parameters],
        layers=planned,
        assignment=result,
        mode=mode,
        algorithm=rule,
        communicator=communicator,
        device=device,
        reshard_after_forward=reshard_after_forward,
        prefetch_depth=prefetch_depth,
        cast_inputs_to=param_dtype if cast_forward_inputs else None,
        open_pool=open_pool if uses_pool(communicator) else None,
        allocation_signatures=allocation_signatures,
    )
    _take_weights(runtime)
    return Dedication(runtime, result)


def runtime_of(model: nn.Module) -> Runtime:
    """Return the runtime of a model that `dedicate_params` was called on, wrapped or not.

    Raises:
        ValueError: it was not called on it.
    """
    # All have the same; the first is soon found.
    site = next(each_site(model), None)
    if site is None:
        raise ValueError(
            f"{type(model).__name__} has no owned parameters: call dedicate_params first"
        )
    runtime = site.runtime
    assert isinstance(runtime, Runtime)
    return runtime


def _mesh(value: object) -> bool:
    return value is None or isinstance(value, DeviceMesh)


def _function(value: object) -> bool:
    return value is None or callable(value)


def _flag(value: object) -> bool:
    return isinstance(value, bool)


def _dtype(value: object) -> bool:
    if not isinstance(value, torch.dtype):
        return value is None
    return value.is_floating_point and value.itemsize >= 2


def _sum_dtype(value: object) -> bool:
    # Sums of float16 overflow.
    return _dtype(value) and value is not torch.float16


def _algorithm(value: object) -> bool:
    return isinstance(value, str | MatrixOptimizer) or (
        isinstance(value, type) and issubclass(value, MatrixOptimizer)
    )


def _rule(algorithm: str | type[MatrixOptimizer] | MatrixOptimizer) -> MatrixOptimizer:
    found = find(algorithm) if isinstance(algorithm, str) else algorithm
    return found() if isinstance(found, type) else found


def _cost(value: object) -> bool:
    return isinstance(value, str | CostTable)


# Each argument of `dedicate_params` but the model and the specs: what will do, and its name.
_ARGUMENTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "mesh": (_mesh, "a DeviceMesh or None"),
    "replicate_mesh": (_mesh, "a DeviceMesh or None"),
    "predicate": (_function, "a function of name and parameter, or None"),
    "hook_boundary_predicate": (_function, "a function of name and module, or None"),
    "reshard_after_forward": (_flag, "True or False"),
    "param_dtype": (_dtype, "a floating torch.dtype of 16 bits or more, or None"),
    "reduce_dtype": (_sum_dtype, "torch.float32, torch.bfloat16 or torch.float64, or None"),
    "cast_forward_inputs": (_flag, "True or False"),
    "communication": (
        lambda v: v in get_args(Communication) or callable(v),
        f"{', '.join(get_args(Communication))}, or a function that opens a communicator",
    ),
    "mode": (lambda v: v in get_args(Mode), " or ".join(get_args(Mode))),
    "algorithm": (_algorithm, "a name or a MatrixOptimizer, class or instance"),
    "cost": (_cost, "measured, model, the name or path of a table, or a CostTable"),
    "assignment": (
        lambda v: v in get_args(AssignmentMethod),
        f"one of {', '.join(get_args(AssignmentMethod))}",
    ),
    "small_matrix_numel": (is_count, "a whole number >= 0"),
    "byte_cap": (lambda v: v is None or is_size(v), "a number >= 0 or None"),
    "prefetch_depth": (is_count, "a whole number >= 0"),
    "gradient_divide_factor": (
        lambda v: v is None or (is_size(v) and v > 0),
        "a positive number or None",
    ),
    "allocation_signatures": (_flag, "True or False"),
    "timeout": (lambda v: v is None or v > timedelta(), "a positive timedelta or None"),
}


def _check_arguments(**arguments: object) -> None:
    for name, value in arguments.items():
        expect(name, value, *_ARGUMENTS[name])


def _grid(mesh: DeviceMesh | None, replicate_mesh: DeviceMesh | None) -> list[list[int]]:
    """Return the global rank at each (row, column)."""
    if mesh is None:
        if replicate_mesh is not None:
            raise ValueError("replicate_mesh: give mesh, the shard axis, too")
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"mesh: needed, there are {dist.get_world_size()} ranks; e.g. "
                'init_device_mesh("cpu", (dist.get_world_size(),))'
            )
        return [[0]]
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh: rank {dist.get_rank()} is not in {mesh}")
    if replicate_mesh is None:
        if mesh.ndim == 1:
            return [mesh.mesh.tolist()]
        if mesh.ndim == 2:
            return mesh.mesh.tolist()  # type: ignore[no-any-return]
        raise ValueError(f"mesh: expected (shard,) or (replicate, shard), got {mesh.ndim} axes")
    if mesh.ndim != 1 or replicate_mesh.ndim != 1:
        raise ValueError(
            f"mesh and replicate_mesh: expected one axis each, got {mesh.ndim} and "
            f"{replicate_mesh.ndim}"
        )
    # A sub-mesh knows its own ranks only; my column's ranks know all the rows between them.
    rows: list[list[int]] = [[] for _ in range(replicate_mesh.size())]
    dist.all_gather_object(rows, mesh.mesh.tolist(), group=replicate_mesh.get_group())
    return rows


def _device(model: nn.Module, mesh: DeviceMesh | None) -> torch.device:
    """Where masters and buffers live: with the parameters (meta until `to_empty`)."""
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1:
        raise ValueError(
            f"the model's parameters are on several devices: {sorted(map(str, devices))}"
        )
    device = devices.pop()
    if mesh is not None and device.type not in ("meta", mesh.device_type):
        raise ValueError(
            f"the model is on {device}, the mesh on {mesh.device_type}: move the model"
        )
    return device


def _local_device(kind: str) -> torch.device:
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _precision(
    layer: SelectedLayer, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> Precision:
    dtypes = {p.parameter.dtype: p.name for p in layer.parameters}
    if len(dtypes) > 1 and param_dtype is None:
        shown = ", ".join(f"{name} {dtype}" for dtype, name in dtypes.items())
        raise ValueError(f"{layer.name}: parameters of several dtypes ({shown}); give param_dtype")
    original = next(iter(dtypes), torch.float32)
    master = torch.float64 if torch.float64 in dtypes else torch.float32
    compute = param_dtype or original
    reduce = reduce_dtype or compute
    if reduce is torch.float16:
        raise ValueError(f"{layer.name}: sums of float16 overflow; give reduce_dtype=torch.float32")
    return Precision(master, compute, reduce)


def _cost_table(
    cost: str | CostTable,
    rule: MatrixOptimizer,
    layers: Sequence[Layer],
    device: torch.device,
    communicator: C10dCommunicator | None,
) -> CostTable:
    matrices = [m for layer in layers for p in layer.parameters for m in p.matrices]
    shapes = [matrix.shape for matrix in matrices]
    if isinstance(cost, CostTable):
        cost.check(matrices, rule.label())
        return cost
    if cost == "model":
        return model_cost(shapes, rule.flops, rule.label())
    where = communicator.device if communicator else device
    if where.type == "meta":
        where = _local_device("cuda" if torch.cuda.is_available() else "cpu")
    mine = measure(
        shapes, lambda rows, columns: rule.measure_seconds(rows, columns, where), rule.label()
    )
    if communicator is None:
        return mine
    keys = list(mine.seconds)
    times = torch.tensor([mine.seconds[key] for key in keys], dtype=torch.float64, device=where)
    rows = communicator.collect(times).tolist()
    return median([replace(mine, seconds=dict(zip(keys, row, strict=True))) for row in rows])


def _shapes(layers: Sequence[SelectedLayer]) -> list[tuple[str, tuple[int, ...], bool]]:
    every = [p for layer in layers for p in layer.parameters]
    return [(p.name, tuple(p.shape), p.parameter.requires_grad) for p in every]


def _agree(
    communicator: C10dCommunicator | None,
    assignment: Assignment,
    layouts: Sequence[Layout],
    settings: object,
) -> None:
    """Check that all ranks computed the same owners and offset tables (invariant I6).

    And that they were given the same `settings`: what decides which collectives run, and on what.
    """
    if communicator is None:
        return
    tables = [assignment.digest(), *(layout.digest() for layout in layouts)]
    text = "".join([*tables, repr(settings)])
    digest = int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)
    communicator.agree(
        digest,
        "ranks disagree on owners, offsets or settings",
        "do all have the same model (shapes, dtypes, requires_grad) and the same arguments?",
    )


def _make_sites(
    model: nn.Module, layers: Sequence[SelectedLayer], groups: Sequence[Group]
) -> list[Site]:
    root = Site("", model)
    sites = {model: root}
    for layer in layers:
        sites.setdefault(layer.module, Site(layer.name, layer.module))
    for layer, group in zip(layers, groups, strict=True):
        site = sites[layer.module]
        site.group = group
        borrowed = tuple(groups[i] for i in sorted(layer.borrowed))
        site.groups = ((group,) if layer.parameters else ()) + borrowed
    for module, site in sites.items():
        make_site(module, site)
    return list(sites.values())


def _take_weights(runtime: Runtime) -> None:
    """Move the model's present weights to their owners."""
    for site in runtime.sites:
        site.runtime = runtime
    for group in runtime.groups:
        full = [entry.parameter.detach() for entry in group.parameters]
        group.allocate()
        if group.device.type != "meta":
            for index, value in enumerate(full):
                group.write(index, value)
    for site in runtime.sites:
        site.guard_state_dict()
