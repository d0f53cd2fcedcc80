"""`dmuon plan`: what a job will cost, before it runs."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.patching import require_patched_torchtitan

if TYPE_CHECKING:
    from torchtitan_dmuon.config.manager import Job
    from torchtitan_dmuon.planner.plan import Plan
    from torchtitan_dmuon.planner.setting import Setting

_MOST_RANKS = 2**20

_OPEN_NODES = 2
"""Nodes of a job whose degrees fit any number of them."""


@dataclass(kw_only=True, slots=True)
class Options:
    """Say what a job will cost, before it runs: owners and their balance, memory and traffic per
    GPU, Newton-Schulz time, whether it fits and what to change if not.

    dmuon plan qwen32b_hsdp_z3.toml --nodes 16 --line D

    No GPU is needed: the model is built without memory, and the owners are those that the job
    would choose from the same table of times. Options --section.key value change the job.

    Exit status 0: it fits; 1: it does not; 2: bad arguments.
    """

    config: Annotated[str, tyro.conf.Positional] = ""
    """Job config: a path, or a file of train_configs/."""

    nodes: int = 0
    """Nodes. 0: as many as the config's degrees need; 2 where they leave it open."""

    gpus_per_node: int = 8
    """GPUs of a node."""

    device: str = "h100-80g"
    """What they are: h100-80g, h200-141g, b200-180g, a100-80g, a100-40g."""

    line: Literal["", "A", "B", "C", "D", "torch"] = ""
    """Line of the comparison, in place of the config's."""

    json: bool = False
    """Print the plan as JSON; docs/planner.md explains the keys."""

    html: str = ""
    """Write a report to this file too: one page that opens offline."""

    assignment: Literal["", "lpt", "round_robin", "elements"] = ""
    """How owners are chosen, in place of the job's: lpt (balanced by time), round_robin (unit by
    unit), elements (balanced by number of elements). Times judge all of them."""

    byte_cap: str = ""
    """Excess over the mean bytes that a rank may own, in place of the job's: 0.1, or off."""

    expert_units: Literal["each", "fused", "small"] = "each"
    """What becomes of the experts of a layer. each: every matrix has its own owner, as in training.
    fused: all of a stacked tensor share one. small: they join the small matrices of their layer."""

    column_balance: Literal["on", "off"] = "on"
    """Whether the columns of the mesh, and so the rails, are balanced first. off: one greedy pass
    over the ranks, tried column by column."""

    layer_spreading: Literal["on", "off"] = "on"
    """Whether the units of a layer have different owners."""

    cost: str = ""
    """Table of Newton-Schulz times: a name (h100, cpu), a .json file of dmuon costs, or model (a
    formula). Empty: the device's table if it has the job's shapes, else model."""


def parse_cap(text: str, own: float) -> float | None:
    """Return the byte cap that `--byte-cap` asks for; None: no cap.

    Raises:
        ConfigError: it is neither a number nor off.
    """
    if not text:
        return own
    if text == "off":
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise ConfigError(f'--byte_cap: expected a number >= 0, or off, got "{text}"')
    return value


def setting_of(options: Options, job: Job) -> Setting:
    """Return where and how the job is planned.

    Raises:
        ConfigError: a number that cannot be.
    """
    from torchtitan_dmuon.config.checks import degrees
    from torchtitan_dmuon.planner.devices import find_device
    from torchtitan_dmuon.planner.setting import Setting

    device = find_device(options.device)
    per_node = options.gpus_per_node
    if per_node < 1 or options.nodes < 0:
        raise ConfigError(
            f"--nodes {options.nodes} --gpus_per_node {per_node}: expected at least 1 of each"
        )
    nodes = options.nodes
    if not nodes:
        ranks = degrees(job) or _OPEN_NODES * per_node
        per_node = min(ranks, per_node)
        nodes, left = divmod(ranks, per_node)
        if left:
            raise ConfigError(
                f"{job.at('parallelism')}: the degrees need {ranks} ranks, which nodes of "
                f"{per_node} GPUs do not make; give --nodes and --gpus_per_node"
            )
    if nodes * per_node > _MOST_RANKS:
        raise ConfigError(f"--nodes {nodes}: more than {_MOST_RANKS} GPUs are not planned")
    return Setting(
        nodes=nodes,
        gpus_per_node=per_node,
        device=device,
        assignment=options.assignment or None,
        byte_cap=parse_cap(options.byte_cap, job.config.parallelism.byte_cap),
        expert_units=options.expert_units,
        column_balance=options.column_balance == "on",
        layer_spreading=options.layer_spreading == "on",
        cost=options.cost,
    )


def plan_job(job: Job, setting: Setting) -> Plan:
    """Return the plan of a job.

    Raises:
        ConfigError: it cannot be planned; the message says why.
    """
    from torchtitan_dmuon.config.checks import check_for_plan
    from torchtitan_dmuon.planner.estimate import make_plan

    check_for_plan(job, setting.nodes * setting.gpus_per_node)
    try:
        return make_plan(job.config, setting, path=job.path)
    except ConfigError:
        raise
    except (ValueError, OSError) as e:
        raise ConfigError(f"{job.path}: {' '.join(str(e).split())}") from e


def plan_here(job: Job, world_size: int, ranks_per_node: int, kind: str) -> Plan:
    """Return the plan of a job on the machine that it runs on.

    Args:
        job: With degrees that fit.
        world_size: All ranks.
        ranks_per_node: Ranks of a node.
        kind: "cuda" or "cpu".

    Raises:
        ConfigError: it cannot be planned.
    """
    from torchtitan_dmuon.planner.devices import this_device
    from torchtitan_dmuon.planner.setting import Setting

    per_node = min(ranks_per_node, world_size)
    setting = Setting(
        nodes=max(1, world_size // per_node),
        gpus_per_node=per_node,
        device=this_device(kind, per_node),
        byte_cap=job.config.parallelism.byte_cap,
    )
    return plan_job(job, setting)


def line_for_log(job: Job, world_size: int, ranks_per_node: int, kind: str) -> str:
    """Return the plan in one line, or why there is none: a job does not need one."""
    from torchtitan_dmuon.planner.text import one_line

    try:
        return f"plan: {one_line(plan_here(job, world_size, ranks_per_node, kind))}"
    except ConfigError as e:
        return f"plan: none ({e})"


def run(options: Options, job_options: list[str], arguments: list[str]) -> None:
    """Plan a job and print the plan.

    Raises:
        ConfigError, PatchError: what is wrong, in one line.
        SystemExit: status 1 if the job does not fit.
    """
    if not options.config:
        raise ConfigError("dmuon plan: expected a job config, e.g. qwen32b_hsdp_z3.toml")
    check_report(options.html)
    require_patched_torchtitan()
    # Imported late, here and above: they import torchtitan, whose patches come first.
    from torchtitan_dmuon.config.manager import load_job
    from torchtitan_dmuon.planner.text import report

    line = ["--line", options.line] if options.line else []
    job = load_job(["--config", options.config, *line, *job_options])
    plan = plan_job(job, setting_of(options, job))
    if options.html:
        write_report(plan, options.html)
    print(plan.to_json() if options.json else report(plan))
    if not plan.fits:
        raise SystemExit(1)


def check_report(html: str) -> None:
    """Raise ConfigError if the report's folder is not there, or a file cannot take its place."""
    if not html:
        return
    path = Path(html).resolve()
    if not path.parent.is_dir():
        raise ConfigError(f"--html: no such folder: {path.parent}")
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a device or pipe"
        raise ConfigError(f"--html: {path} is {kind}; expected a file, e.g. plan.html")


def write_report(plan: Plan, path: str) -> None:
    """Write the page.

    Raises:
        ConfigError: it cannot be written.
    """
    from torchtitan_dmuon.planner.html import write

    try:
        write(plan, Path(path))
    except OSError as e:
        raise ConfigError(f"--html: {os.fspath(path)}: {e.strerror or e}") from e
