"""`dmuon bench`: the lines of the comparison, in several layouts, in one run."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from torchtitan_dmuon.bench.layouts import FIXED_KEYS, NAMES, Layout, find_layouts, find_ranks
from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.patching import require_patched_torchtitan

if TYPE_CHECKING:
    from torchtitan_dmuon.bench.contest import Contender
    from torchtitan_dmuon.config.manager import Job

LineName = Literal["A", "B", "C", "D", "torch"]
ModeName = Literal["ddp", "fsdp_z2", "fsdp_z3", "hsdp_z2", "hsdp_z3"]

SWITCHED_KEYS = {"line", "parallelism.mode", "parallelism.communication", "optimizer.name"}


@dataclass(kw_only=True, slots=True)
class Options:
    """Train the same model on the same random tokens and ranks with each line in each mode, in
    turns, and compare.

    One world of ranks builds a trainer for every pair of line and mode from one job config and the
    same initial weights. Then all of them take real training steps in turns (forward, backward,
    reduction, clipping, update, publish), in an order that rotates by one each round. Timed is the
    slowest rank, from a barrier until all work is done, a publish that would overlap the next
    step included. Figures for each line and mode:

    step_ms: one step, median over the rounds. step_ms_iqr: its spread, third minus first
    quartile. ratio_to_A: step time over that of line A in the same mode and round, median (above
    1: slower than A). tokens_per_s: of all ranks together. peak_memory_mb: what the job adds to a
    process, state and buffers included, on the heaviest rank, in MiB; on a CPU from the resident
    set. pool_mb: line D's symmetric pool, which is part of that. bytes_sent: what all ranks
    together send in one step, counted by the kernel on their connections (unknown with NCCL; line
    D's pool needs none on one machine). final_loss: of the last step; lines that do the same
    arithmetic agree on it.

    Further options are those of run_train.sh: --section.key value changes the job of all lines,
    e.g. --model.flavor debug --optimizer.ns_steps 3.
    """

    lines: list[LineName] = field(default_factory=lambda: ["A", "B", "C", "D", "torch"])
    """
    Comma-separated. A: FSDP2 with AdamW. B: whole matrices are gathered and orthogonalized on every
    rank. C: matrix owners. D: matrix owners over our operators. torch: torch.optim.Muon on FSDP2's
    DTensors.
    """

    modes: list[ModeName] = field(
        default_factory=lambda: ["fsdp_z2", "fsdp_z3", "hsdp_z2", "hsdp_z3"]
    )
    """
    Comma-separated. fsdp shards over all ranks, hsdp inside a node and replicates over nodes (on
    one node: 2 halves), ddp not at all. z2 keeps weights gathered until the backward pass, z3
    gathers them again.
    """

    ranks: int | None = None
    """Ranks to start here. None: all GPUs if there are 4 or more, else 4 ranks on the CPU."""

    rows: int | None = None
    """Replicas of hsdp, each of ranks / rows ranks. None: one per node; on one node 2."""

    config: str = "bench_cpu.toml"
    """Job config of all lines: a path, or a file of train_configs/. Its own line is ignored."""

    rounds: int = 5
    """Timed rounds."""

    warmup_rounds: int = 3
    """
    Rounds before them that are not timed. Line D opens its pool in its second step: with fewer than
    3 some of what is timed would be line C.
    """

    steps: int = 1
    """Consecutive steps of one line in a round; from 2 on a publish can overlap a forward pass."""

    json: str = ""
    """File to write the figures to as well, as a list of objects."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A pair of line and mode with its job."""

    line: LineName
    layout: Layout
    job: Job


def check_options(options: Options, job_options: Sequence[str]) -> None:
    """Check what needs no torch. Raises ConfigError."""
    for name in ("rounds", "steps"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name}: expected at least 1, got {getattr(options, name)}")
    if options.warmup_rounds < 0:
        raise ConfigError(f"--warmup_rounds: expected 0 or more, got {options.warmup_rounds}")
    for name in ("ranks", "rows"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name}: expected at least 1, got {value}")
    for name in ("lines", "modes"):
        if not getattr(options, name):
            raise ConfigError(f"--{name}: expected at least one name")
    if options.json and not Path(options.json).resolve().parent.is_dir():
        raise ConfigError(f"--json: no such folder: {Path(options.json).resolve().parent}")
    for argument in job_options:
        key = argument.partition("=")[0].removeprefix("--").replace("-", "_")
        if argument.startswith("--") and key in FIXED_KEYS | SWITCHED_KEYS:
            raise ConfigError(f"--{key}: is set by the benchmark; leave it out")


def prepare(
    options: Options, job_options: Sequence[str], world_size: int | None, nodes: int
) -> tuple[list[Entry], int, str]:
    """Resolve and check every job, before any process group is made.

    Args:
        options: The benchmark's options.
        job_options: The job's.
        world_size: Ranks of the world, or None to choose what this machine allows.
        nodes: Nodes of the world.

    Returns:
        The jobs, mode by mode; the number of ranks; the device they run on ("cuda" or "cpu").

    Raises:
        ConfigError, PatchError: what is wrong, in one line.
    """
    require_patched_torchtitan()
    # Imported late: these import torchtitan, whose version and patches come first.
    from torchtitan_dmuon.bench.contest import data_parallel_ranks, job_of
    from torchtitan_dmuon.config.build import build
    from torchtitan_dmuon.config.checks import check
    from torchtitan_dmuon.config.manager import load_job

    jobs = {
        line: load_job(["--config", options.config, "--line", line, *job_options])
        for line in dict.fromkeys(options.lines)
    }
    first = next(iter(jobs.values()))
    ranks, device = find_ranks(options.ranks, first.config.device, world_size)
    names = [name for mode in dict.fromkeys(options.modes) for name in NAMES if _key(name) == mode]
    entries = [
        Entry(line, layout, job_of(job, layout))
        for layout in find_layouts(data_parallel_ranks(first, ranks), nodes, names, options.rows)
        for line, job in jobs.items()
    ]
    for entry in entries:
        check(entry.job, ranks, device)
        build(entry.job, device)
    return entries, ranks, device


def _key(name: str) -> str:
    return name.lower().replace("-", "_")


def rows_of(contenders: Sequence[Contender], entries: Sequence[Entry], steps: int) -> list[Any]:
    """Return what --json writes."""
    seconds = {
        (e.line, e.layout): np.array(c.round_seconds) / steps
        for c, e in zip(contenders, entries, strict=True)
    }
    rows = []
    for contender, entry in zip(contenders, entries, strict=True):
        step = seconds[entry.line, entry.layout]
        reference = seconds.get(("A", entry.layout))
        low, middle, high = np.percentile(step, [25, 50, 75])
        sent = [b for b in contender.round_bytes if b is not None]
        rows.append(
            {
                "line": entry.line,
                "mode": entry.layout.key,
                "ranks": entry.layout.replicate * entry.layout.shard,
                "step_ms": 1e3 * float(middle),
                "step_ms_iqr": 1e3 * float(high - low),
                "ratio_to_A": None if reference is None else float(np.median(step / reference)),
                "tokens_per_s": contender.tokens_per_step / float(middle),
                "peak_memory_mb": contender.peak_bytes / 2**20,
                "pool_mb": contender.pool_bytes / 2**20,
                "bytes_sent": round(float(np.median(sent)) / steps) if sent else None,
                "final_loss": contender.final_loss,
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]], heading: str) -> str:
    """Return the rows as text for people."""
    lines = [
        heading,
        "",
        f"{'mode':<8} {'line':<6} {'step ms':>9} {'IQR':>8} {'to A':>6} {'tokens/s':>10}"
        f" {'peak MiB':>9} {'pool':>6} {'sent MB':>9} {'loss':>9}",
    ]
    mode = None
    for row in rows:
        ratio = "-" if row["ratio_to_A"] is None else f"{row['ratio_to_A']:.2f}"
        sent = "-" if row["bytes_sent"] is None else f"{row['bytes_sent'] / 1e6:,.1f}"
        lines.append(
            f"{row['mode'] if row['mode'] != mode else '':<8} {row['line']:<6}"
            f" {row['step_ms']:>9,.1f} {row['step_ms_iqr']:>8,.1f} {ratio:>6}"
            f" {row['tokens_per_s']:>10,.0f} {row['peak_memory_mb']:>9,.0f} {row['pool_mb']:>6,.1f}"
            f" {sent:>9}"
            f" {row['final_loss']:>9.5f}"
        )
        mode = row["mode"]
    return "\n".join(lines)


def _heading(contender: Contender, options: Options, device: str) -> str:
    import torch
    import torchtitan

    import torchtitan_dmuon

    trainer = contender.trainer
    spec, size = trainer.config.model_spec, trainer.parallel_dims.world_size
    assert spec is not None
    where = f"cpu ({os.cpu_count()} cores, {platform.machine()})"
    if device == "cuda":
        where = torch.cuda.get_device_name()
    return (
        f"{spec.name} {spec.flavor}, {size} ranks on {where}, {contender.tokens_per_step:,} tokens "
        f"a step\nrounds: {options.warmup_rounds} to warm up, {options.rounds} timed, steps in "
        f"each: {options.steps}\ntorchtitan_dmuon {torchtitan_dmuon.__version__}, torchtitan "
        f"{torchtitan.__version__}, torch {torch.__version__}"
    )


def run_rank(options: Options, job_options: Sequence[str]) -> None:
    """One rank: build the trainers, let them take turns, print and write the result on rank 0."""
    import torch.distributed as dist

    from torchtitan_dmuon.bench.contest import Contender, compete, quiet_rank, stdout_for_results
    from torchtitan_dmuon.bench.measure import PeakMemory
    from torchtitan_dmuon.config.build import build

    rank, world_size, nodes = quiet_rank()
    start = time.monotonic()

    def say(text: str) -> None:
        if rank == 0:
            print(f"[{time.monotonic() - start:4.0f} s] {text}", file=sys.stderr, flush=True)

    with stdout_for_results() as results, tempfile.TemporaryDirectory() as folder:
        entries, _, device = prepare(options, job_options, world_size, nodes)
        contenders = []
        for number, entry in enumerate([entries[0], *entries]):
            memory = PeakMemory()
            entry.job.config.dump_folder = folder
            name = f"{entry.line} {entry.layout.key}"
            contender = Contender(name, entry.layout, build(entry.job, device).build())
            contender.settle(memory)
            if number == 0:  # only takes what a process pays once
                contender.trainer.close()
                continue
            say(f"built {name}: loss {contender.first_loss:.5f}")
            contenders.append(contender)
        compete(
            contenders,
            rounds=options.rounds,
            warmup_rounds=options.warmup_rounds,
            steps_per_round=options.steps,
            say=say,
        )
        rows = rows_of(contenders, entries, options.steps)
        if rank == 0:
            print(table(rows, _heading(contenders[0], options, device)), file=results)
            if options.json:
                Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
        for contender in contenders:
            contender.trainer.close()
        dist.destroy_process_group()


def run(options: Options, job_options: Sequence[str], arguments: Sequence[str]) -> None:
    """Check everything once, then start the ranks; inside a rank, be one.

    Args:
        options: The benchmark's options.
        job_options: Options of the job.
        arguments: All of them, as given to `dmuon bench`, for the ranks.

    Raises:
        ConfigError, PatchError: before any rank starts.
    """
    check_options(options, job_options)
    if "RANK" in os.environ:
        run_rank(options, job_options)
        return
    from torchtitan_dmuon.bench.contest import become_torchrun

    entries, ranks, device = prepare(options, job_options, None, 1)
    names = ", ".join(f"{entry.line} {entry.layout.key}" for entry in entries)
    print(f"{ranks} ranks on {device}: {names}", file=sys.stderr, flush=True)
    become_torchrun(ranks, device, ["-m", "torchtitan_dmuon.cli", "bench", *arguments])
