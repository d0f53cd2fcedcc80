#!/usr/bin/env python3
"""Compare the speed of a training step in several layouts, in one run (see --help)."""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import gc
import json
import logging
import os
import platform
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, TextIO

import numpy as np

from torchtitan_dmuon.config.errors import ConfigError, nearest
from torchtitan_dmuon.patching import PatchError, require_patched_torchtitan

if TYPE_CHECKING:
    from torchtitan_dmuon.config.manager import Job
    from torchtitan_dmuon.trainer import Trainer

NAMES = ("DDP", "FSDP-Z2", "FSDP-Z3", "HSDP-Z2", "HSDP-Z3")
DEFAULT_RANKS = 4
SPMD_BACKEND: Final = "partial_dtensor"
"""One process holds the meshes of one spmd_types trainer only; here it has several trainers."""
FIXED_KEYS = {
    "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree",
    "parallelism.fsdp_reshard_after_forward",
    "parallelism.spmd_backend",
    "dataloader.dataset",
    "training.steps",
}
"""Keys that this script sets itself; giving one on the command line is an error."""

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
hold them together; choose fewer with --layouts. loss is that of one more step at the end, untimed:
layouts that do the same work agree on it. All layouts run with parallelism.spmd_backend
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


@dataclass(frozen=True, slots=True)
class Layout:
    """How the data-parallel ranks are arranged, and whether the backward pass gathers again."""

    name: str
    replicate: int
    shard: int
    reshard: Literal["never", "always"]


def find_layouts(data_parallel: int, nodes: int, names: Sequence[str] = NAMES) -> list[Layout]:
    """Return the named layouts for this many data-parallel ranks on this many nodes.

    Raises:
        ConfigError: too few ranks, or HSDP is named and they do not make rows of at least 2.
    """
    rows = nodes if nodes > 1 else 2
    columns, rest = divmod(data_parallel, rows)
    if data_parallel < 2:
        raise ConfigError("1 data-parallel rank: layouts differ from 2 ranks on; try --ranks 4")
    if (rest or columns < 2) and any(name.startswith("HSDP") for name in names):
        raise ConfigError(
            f"{data_parallel} data-parallel ranks: HSDP needs {rows} rows of equal length, at "
            f"least 2 each, so a multiple of {rows} from {2 * rows} on; try --ranks or --layouts"
        )
    degrees = {"DDP": (data_parallel, 1), "FSDP": (1, data_parallel), "HSDP": (rows, columns)}
    found = []
    for name in names:
        kind, _, zero = name.partition("-")
        found.append(Layout(name, *degrees[kind], "always" if zero == "Z3" else "never"))
    return found


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
    from torchtitan_dmuon.config.build import build
    from torchtitan_dmuon.config.checks import check, model_parallel
    from torchtitan_dmuon.config.manager import load_job

    job = load_job(["--config", options.config, *rest])
    ranks, device = find_ranks(options.ranks, job.config.device, world_size)
    per_sample = model_parallel(job)
    if per_sample < 1 or ranks % per_sample:
        raise ConfigError(
            f"{job.at('parallelism')}: {ranks} ranks are not a multiple of {per_sample}, the "
            "product of the tensor, context and pipeline degrees"
        )
    found = find_layouts(ranks // per_sample, nodes, options.layouts)
    jobs = {layout: _job_of(job, layout) for layout in found}
    for one in jobs.values():
        check(one, ranks, device)
        build(one, device)
    return jobs, ranks, device


def find_ranks(
    asked: int | None, wanted_device: str, world_size: int | None
) -> tuple[int, Literal["cuda", "cpu"]]:
    """Return the number of ranks and their device. Raises ConfigError."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted_device == "cpu":
        gpus = 0
    if world_size is not None:  # started by torchrun
        if asked not in (None, world_size):
            raise ConfigError(f"--ranks {asked}: torchrun has started {world_size}")
        return world_size, "cuda" if gpus else "cpu"
    ranks = asked or max(gpus, DEFAULT_RANKS)
    if wanted_device == "cuda" and ranks > gpus:
        raise ConfigError(f"device: {ranks} ranks need as many GPUs, found {gpus}; try --ranks")
    return ranks, "cuda" if gpus >= ranks else "cpu"


def _job_of(job: Job, layout: Layout) -> Job:
    """Return the job in this layout, with random tokens, and without anything written or saved."""
    from torchtitan_dmuon.config.schema import TrainData
    from torchtitan_dmuon.data import RANDOM_TOKENS

    config = copy.deepcopy(job.config)
    config.parallelism.data_parallel_replicate_degree = layout.replicate
    config.parallelism.data_parallel_shard_degree = layout.shard
    config.parallelism.fsdp_reshard_after_forward = layout.reshard
    config.parallelism.spmd_backend = SPMD_BACKEND
    config.dataloader = TrainData(dataset=RANDOM_TOKENS)
    config.hf_assets_path = ""
    # Far away: the schedule stays near its top, and only the steps that are asked for log.
    config.training.steps = config.metrics.log_freq = 1_000_000
    config.metrics.enable_tensorboard = config.metrics.enable_wandb = False
    config.checkpoint.enable = config.validator.enable = False
    return dataclasses.replace(job, config=config)


class Contender:
    """One layout with its trainer, ready to take steps.

    All methods are collective: every rank calls them in the same order.
    """

    def __init__(self, layout: Layout, trainer: Trainer) -> None:
        self.layout = layout
        self.trainer = trainer
        self.round_seconds: list[float] = []
        self.losses: list[float] = []
        self._data = trainer.batch_generator(trainer.dataloader)
        trainer.metrics_processor.log = self._record

    def _record(self, step: int, global_avg_loss: float, *args: Any, **kwargs: Any) -> None:
        self.losses.append(global_avg_loss)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step on all ranks together."""
        trainer, dims = self.trainer, self.trainer.parallel_dims
        training = trainer.config.training
        sequences = training.local_batch_size * dims.dp_replicate * dims.dp_shard
        return int(sequences * trainer.gradient_accumulation_steps * training.seq_len)

    def timed(self, steps: int) -> float:
        """Take consecutive steps; return the seconds that the slowest rank needed for them."""
        import torch.distributed as dist
        from torchtitan.tools.utils import device_module

        # What earlier steps left behind is collected outside the timed part.
        gc.collect(1)
        device_module.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self._step()
        device_module.synchronize()
        return self._slowest(time.perf_counter() - start)

    def final_loss(self) -> float:
        """Take one more step, and return its loss over all ranks."""
        self.trainer.metrics_processor.config.log_freq = 1
        self._step()
        return self.losses[-1]

    def _step(self) -> None:
        self.trainer.step += 1
        self.trainer.train_step(self._data)

    def _slowest(self, seconds: float) -> float:
        import torch
        import torch.distributed as dist

        slowest = torch.tensor(seconds, dtype=torch.float64, device=self.trainer.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)


def compete(contenders: Sequence[Contender], options: argparse.Namespace) -> None:
    """Take all rounds; fills `round_seconds` of every contender."""
    for number in range(-options.warmup_rounds, options.rounds):
        first = number % len(contenders)
        for contender in [*contenders[first:], *contenders[:first]]:
            seconds = contender.timed(options.steps_per_round)
            if number >= 0:
                contender.round_seconds.append(seconds)


def _spread(values: Any) -> dict[str, float]:
    low, middle, high = np.percentile(values, [10, 50, 90])
    return {"median": float(middle), "p10": float(low), "p90": float(high)}


def summarise(
    contenders: Sequence[Contender], options: argparse.Namespace, device: str
) -> dict[str, Any]:
    """Return what --json prints. Collective, because it takes the step whose loss is shown."""
    import torch
    import torchtitan

    import torchtitan_dmuon

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
            "loss": c.final_loss(),
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


@contextlib.contextmanager
def _stdout_for_results() -> Iterator[TextIO]:
    """Yield the real stdout; whatever else is written there, by libraries too, goes to stderr."""
    with os.fdopen(os.dup(1), "w") as results:
        os.dup2(2, 1)
        yield results


def run_rank(options: argparse.Namespace, rest: list[str]) -> None:
    """One rank: build the trainers, let them compete, print the result on rank 0."""
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A rank that waits for another in a collective does not run Python's handler.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s: %(message)s")
    # Our initialisation does not use DTensor's random operations.
    warnings.filterwarnings("ignore", message="DTensor .* may not have complete support on cpu")
    nodes = world_size // int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    with _stdout_for_results() as results, tempfile.TemporaryDirectory() as folder:
        jobs, _, device = prepare(options, rest, world_size, nodes)
        from torchtitan_dmuon.config.build import build

        contenders = []
        for layout, job in jobs.items():
            job.config.dump_folder = folder
            contenders.append(Contender(layout, build(job, device).build()))
        compete(contenders, options)
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
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    threads = 1 if device == "cuda" else max(1, (os.cpu_count() or 1) // ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    names = ", ".join(layout.name for layout in jobs)
    print(f"{ranks} ranks on {device}: {names}", file=sys.stderr, flush=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    os.execv(sys.executable, [sys.executable, *launcher, os.path.abspath(__file__), *sys.argv[1:]])


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
