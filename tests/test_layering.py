"""Imports inside the package run one way."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "torchtitan_dmuon"

# Lowest first. A module imports from lower levels only, and freely inside its own data/ or models/.
LEVELS = [
    {"memory", "native"},
    {
        "patching",
        "arguments",
        "config.errors",
        "log",
        "lost_rank",
        "checkpoint.held",
        "checkpoint.meter",
    },
    {"checkpoint.errors", "checkpoint.beside"},
    {"checkpoint.folder", "checkpoint.metadata"},
    {"checkpoint.archive"},
    {"checkpoint.planners"},
    {"ownership", "optim.symmetric_matmul", "optim.matrix_optimizer"},
    {
        "comm.streams",
        "tracing",
        "runtime.fsdp",
        "optim.newton_schulz",
        "optim.adamw_rule",
        "optim.report",
        "optim.saved",
        "optim.matrix_step",
        "optim.options",
    },
    {"comm.communicator", "comm.binding", "comm.ranks", "optim.replay"},
    {"comm", "optim.algorithms"},
    {
        "comm.c10d",
        "comm.window",
        "runtime.layout",
        "runtime.pool",
        "runtime.signatures",
    },
    {"comm.shm", "comm.gin", "comm.publish"},
    {"comm.operators"},
    {"comm.operators_communicator"},
    {"runtime.publisher"},
    {"runtime.group"},
    {
        "runtime.site",
        "runtime.owner_group",
        "runtime.reductions",
        "baselines.shards",
        "baselines.gather",
        "optim.owned_state",
    },
    {"runtime.backward", "runtime.copies", "runtime.transport"},
    {"runtime.runtime"},
    {
        "runtime.select",
        "runtime.gradients",
        "runtime.open_pool",
        "optim.routing",
    },
    {"runtime.dedicate", "optim.qk_clip"},
    {"optim.update_pass"},
    {"runtime.api", "runtime.replicas", "optim.owner_optimizer"},
    {"optim.muon"},
    {"checkpoint.state", "checkpoint.transfer", "checkpoint.settings"},
    {"checkpoint.own_loop"},
    {"data", "models"},
    {"checkpoint.hf_model", "checkpoint.hf_folder"},
    {"checkpoint.hf_export"},
    {"checkpoint.hf_import"},
    {"metrics", "profiler", "baselines.torch_muon", "optim.container"},
    {"checkpoint.manager"},
    {"config.schema"},
    {"config.toml_io", "config.data_source", "parallelize"},
    {"config.command_line", "config.lines", "config.smoke", "trainer"},
    {"config.manager", "config.algorithm"},
    {"config.optimizer_checks", "config.checkpoint_checks"},
    {"config.checks"},
    {"config.build"},
    {"planner", "simulator", "timeline"},
    {"launch", "train", "bench", "checkpoint.export", "costs", "doctor"},
    {"cli"},
]


def _unit(module: str) -> str:
    name = module.removeprefix("torchtitan_dmuon").lstrip(".")
    for unit in (
        "bench",
        "data",
        "models",
        "native",
        "ownership",
        "planner",
        "simulator",
        "timeline",
        "optim.symmetric_matmul",
        "optim.algorithms",
    ):
        if f"{name}.".startswith(f"{unit}."):
            return unit
    return name


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchtitan_dmuon"):
            modules = {f"{node.module}.{a.name}" for a in node.names}
            known = {m for m in modules if _is_module(m)}
            found |= known or {str(node.module)}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.startswith("torchtitan_dmuon")}
    return {_unit(m) for m in found} - {""}


def _is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split(".")[1:])
    return path.with_suffix(".py").is_file() or path.is_dir()


def _level(unit: str) -> int:
    levels = [i for i, units in enumerate(LEVELS) if unit in units]
    assert levels, f"{unit} has no level: add it to LEVELS where it belongs"
    return levels[0]


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_imports_go_down(path: Path) -> None:
    """No module imports from its own level or above: the design's one arrow."""
    unit = _unit(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
    unit = unit.removesuffix(".__init__").removesuffix("__init__")
    for imported in _imports(path):
        if unit and imported != unit:
            assert _level(imported) < _level(unit), f"{unit} imports {imported}"
