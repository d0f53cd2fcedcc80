#!/usr/bin/env python3
"""Compare the speed of a training step in several layouts, in one run (see --help)."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from torchtitan_dmuon.bench.layouts import FIXED_KEYS, NAMES, Layout, find_layouts, find_ranks
from torchtitan_dmuon.config.errors import ConfigError, nearest
from torchtitan_dmuon.patching import PatchError, require_patched_torchtitan

if TYPE_CHECKING:
    from torchtitan_dmuon.bench.contest import Contender
    from torchtitan_dmuon.config.manager import Job

_DESCRIPTION = f"""\
Compare the speed of a training step in several layouts, in one run.

One world of ranks builds a trainer for each layout from the same job config and the same initial
weights, then alternates: every round takes real training steps (forward, backward, reduction,
clipping, update) of every layout, in an order that rotates by one each round, so that a machine
that slows down or speeds up meanwhile changes no ratio. Timed is the slowest rank, from a barrier
to the end of the device's work. A round gives one ratio per layout: its tokens per second over
those of the baseline in the same round. Data are random tokens and cost nothing.

layouts: {", ".join(NAMES)}
  DDP replicates on all ranks, FSDP shards over all ranks, HSDP shards inside a node and
  replicates over nodes (on one node: 2 halves). Z2 (ZeRO-2) keeps weights gathered until the
  backward pass, Z3 (ZeRO-3) gathers them again."""

_EPILOG = """\
Further options are those of run_train.sh: --section.key value changes the job of all layouts,
e.g. --model.flavor 0.5B --training.seq_len 512. All trainers live at the same time, so memory must
hold them together; choose fewer with --layouts. loss is that of the last step: layouts that do the
same work agree on it. All layouts run with parallelism.spmd_backend
partial_dtensor, also where torchtitan's default is spmd_types: that one serves a single layout in a
process.

Run as it is, the script starts its own ranks on this machine: all GPUs if there are 4 or more,
else 4 ranks on the CPU. Under torchrun it takes the ranks it is given. The table (or with --json
one JSON object) goes to stdout, everything else to stderr. Exit status: 0, 1 failed, 2 bad
arguments or config.

examples:
  .venv/bin/python scripts/bench_modes.py --rounds 20
  .venv/bin/python scripts/bench_modes.py --layouts FSDP-Z2,FSDP-Z3 --baseline FSDP-Z3 --json
  .venv/bin/python scripts/bench_modes.py --config qwen7b_fsdp_z3.toml --layouts FSDP-Z3,HSDP-Z3"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"error: {message} (see --help)", file=sys.stderr)
        sys.exit(2)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got '{text}'")
    return int(text)


def _name(text: str) -> str:
    for name in NAMES:
        if text.upper().replace("_", "-") == name:
            return name
    raise argparse.ArgumentTypeError(
        f"unknown layout '{text}'{nearest(text, NAMES)} (known: {', '.join(NAMES)})"
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_name(part.strip()) for part in text.split(",")))


def read_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return this script's options, and what is left: options of the job. Exits on a mistake."""
    parser = _Parser(
        prog="bench_modes.py",
        allow_abbrev=False,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--config", default="debug.toml", help="job config that all layouts share (debug.toml)")
    add("--layouts", type=_names, default=NAMES, help="comma-separated names (default: all)")
    add("--baseline", type=_name, help="layout that ratios refer to (default: the first)")
    add("--rounds", type=_count, default=10, help="timed rounds (10)")
    add("--warmup-rounds", type=_count, default=2, help="rounds before them that are not (2)")
    add("--steps-per-round", type=_count, default=1, help="consecutive steps timed as one (1)")
    add("--ranks", type=_count, help="ranks to start here (all GPUs if 4 or more, else 4)")
    add("--json", action="store_true", help="print JSON instead of a table")
    options, rest = parser.parse_known_args(arguments)
    options.baseline = options.baseline or options.layouts[0]
    if options.baseline not in options.layouts:
        parser.error(f"argument --baseline: {options.baseline} is not among --layouts")
    known = [name for action in parser._actions for name in action.option_strings]
    for argument in rest:
        option = argument.partition("=")[0]
        # The job's own options have a section, except for the device.
        if option.startswith("-") and "." not in option and option != "--device":
            parser.error(f"unknown option {option}{nearest(option, known)}")
        if option[2:] in FIXED_KEYS:
            parser.error(f"{option} is set by this script")
    return options, rest


def prepare(
    options: argparse.Namespace, rest: list[str], world_size: int | None, nodes: int
) -> tuple[dict[Layout, Job], int, str]:
    """Resolve and check the job of every layout, before any process group is made.

    Args:
        options: This script's options.
        rest: The job's.
        world_size: Ranks of the world, or None to choose what this machine allows.
        nodes: Nodes of the world.

    Returns:
        The jobs, the number of ranks, and the device they run on ("cuda" or "cpu").

    Raises:
        ConfigError, PatchError: what is wrong, in one line.
    """
    require_patched_torchtitan()
    # Imported late: these import torchtitan, whose version and patches come first.
    from torchtitan_dmuon.bench.contest import data_parallel_ranks, job_of
    from torchtitan_dmuon.config.build import build
    from torchtitan_dmuon.config.checks import check
    from torchtitan_dmuon.config.manager import load_job

    job = load_job(["--config", options.config, *rest])
    ranks, device = find_ranks(options.ranks, job.config.device, world_size)
    found = find_layouts(data_parallel_ranks(job, ranks), nodes, options.layouts)
    jobs = {layout: job_of(job, layout) for layout in found}
    for one in jobs.values():
        check(one, ranks, device)
        build(one, device)
    return jobs, ranks, device


def _spread(values: Any) -> dict[str, float]:
    low, middle, high = np.percentile(values, [10, 50, 90])
    return {"median": float(middle), "p10": float(low), "p90": float(high)}


def summarise(
    contenders: Sequence[Contender], options: argparse.Namespace, device: str
) -> dict[str, Any]:
    """Return what --json prints."""
    import torch
    import torchtitan

    import torchtitan_dmuon
    from torchtitan_dmuon.bench.contest import SPMD_BACKEND

    config, dims = contenders[0].trainer.config, contenders[0].trainer.parallel_dims
    speed = {
        c.layout.name: c.tokens_per_step * options.steps_per_round / np.array(c.round_seconds)
        for c in contenders
    }
    rows = [
        {
            "name": c.layout.name,
            "replicate": c.layout.replicate,
            "shard": c.layout.shard,
            "reshard_after_forward": c.layout.reshard,
            "tokens_per_second": _spread(speed[c.layout.name]),
            "ratio": _spread(speed[c.layout.name] / speed[options.baseline]),
            "loss": c.final_loss,
        }
        for c in contenders
    ]
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    assert config.model_spec is not None
    return {
        "model": f"{config.model_spec.name} {config.model_spec.flavor}",
        "device": gpu or f"cpu ({os.cpu_count()} cores, {platform.machine()})",
        "ranks": dims.world_size,
        "spmd_backend": SPMD_BACKEND,
        "tokens_per_step": contenders[0].tokens_per_step,
        "rounds": options.rounds,
        "warmup_rounds": options.warmup_rounds,
        "steps_per_round": options.steps_per_round,
        "baseline": options.baseline,
        "versions": {
            "torchtitan_dmuon": torchtitan_dmuon.__version__,
            "torchtitan": torchtitan.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "layouts": rows,
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as text for people."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        f"{result['model']}, {result['ranks']} ranks on {result['device']}, "
        f"{result['tokens_per_step']:,} tokens a step",
        f"rounds: {result['warmup_rounds']} to warm up, {result['rounds']} timed, steps in each: "
        f"{result['steps_per_round']}",
        f"{versions}, {result['spmd_backend']}",
        "",
        f"{'layout':<8} {'rep x shard':>11} {'tokens/s':>12} {'p10 .. p90':>22}"
        f" {'ratio':>7} {'p10 .. p90':>16} {'loss':>9}",
    ]
    for row in result["layouts"]:
        speed, ratio = row["tokens_per_second"], row["ratio"]
        mesh = f"{row['replicate']} x {row['shard']}"
        lines.append(
            f"{row['name']:<8} {mesh:>11} {speed['median']:>12,.0f}"
            f" {speed['p10']:>10,.0f} {speed['p90']:>11,.0f}"
            f" {ratio['median']:>7.3f} {ratio['p10']:>8.3f} {ratio['p90']:>7.3f}"
            f" {row['loss']:>9.5f}"
        )
    lines.append(f"tokens/s: all ranks together; ratio: to {result['baseline']} in the same round")
    return "\n".join(lines)


def run_rank(options: argparse.Namespace, rest: list[str]) -> None:
    """One rank: build the trainers, let them compete, print the result on rank 0."""
    import torch.distributed as dist

    from torchtitan_dmuon.bench.contest import Contender, compete, quiet_rank, stdout_for_results
    from torchtitan_dmuon.config.build import build

    rank, world_size, nodes = quiet_rank()
    with stdout_for_results() as results, tempfile.TemporaryDirectory() as folder:
        jobs, _, device = prepare(options, rest, world_size, nodes)
        contenders = []
        for layout, job in jobs.items():
            job.config.dump_folder = folder
            contenders.append(Contender(layout.name, layout, build(job, device).build()))
        compete(
            contenders,
            rounds=options.rounds,
            warmup_rounds=options.warmup_rounds,
            steps_per_round=options.steps_per_round,
        )
        result = summarise(contenders, options, device)
        if rank == 0:
            print(json.dumps(result, indent=1) if options.json else table(result), file=results)
        for contender in contenders:
            contender.trainer.close()
        dist.destroy_process_group()


def start_ranks(options: argparse.Namespace, rest: list[str]) -> NoReturn:
    """Check everything once, then become torchrun with this script's ranks."""
    with contextlib.redirect_stdout(sys.stderr):
        jobs, ranks, device = prepare(options, rest, None, 1)
        from torchtitan_dmuon.bench.contest import become_torchrun
    names = ", ".join(layout.name for layout in jobs)
    print(f"{ranks} ranks on {device}: {names}", file=sys.stderr, flush=True)
    become_torchrun(ranks, device, [os.path.abspath(__file__), *sys.argv[1:]])


def main() -> int:
    """Entry point. Exit status: 0, 1 failed, 2 bad arguments or config."""
    options, rest = read_arguments(sys.argv[1:])
    try:
        if "RANK" not in os.environ:
            start_ranks(options, rest)
        run_rank(options, rest)
    except (ConfigError, PatchError) as e:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
