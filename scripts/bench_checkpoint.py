#!/usr/bin/env python3
"""How much saving costs a training job: the same job without, with sync and with async saving.

One world of ranks trains three copies of a job in turns. In a round each copy takes the steps of
one interval, of which the first is followed by a save (not the copy that never saves). Timed is
every step on the slowest rank. Ratios are taken within a round, and the order rotates.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
import tyro

from torchtitan_dmuon.bench.contest import (
    SPMD_BACKEND,
    Contender,
    become_torchrun,
    quiet_rank,
    stdout_for_results,
)
from torchtitan_dmuon.bench.layouts import Layout, find_ranks
from torchtitan_dmuon.bench.measure import PeakMemory
from torchtitan_dmuon.config.build import build
from torchtitan_dmuon.config.checks import check
from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.config.manager import Job, load_job
from torchtitan_dmuon.config.schema import TrainData
from torchtitan_dmuon.data import RANDOM_TOKENS
from torchtitan_dmuon.patching import PatchError

MODES = ("never", "sync", "async")


@dataclass(kw_only=True, slots=True)
class Options:
    """Train the same job without saving, with sync and with async saving, in turns; compare."""

    config: str = "debug_owner_hsdp_z3.toml"
    """Job config: a path, or a file of train_configs/."""

    ranks: int = 4
    """Ranks to start here."""

    rounds: int = 7
    """Timed rounds."""

    interval: int = 10
    """Steps of a round; a save follows the first."""

    folder: str = "outputs/bench_checkpoint"
    """Where checkpoints are written, on the disk that is to be measured; deleted at the end."""

    json: str = ""
    """File to write the figures to as well."""


class Saver(Contender):
    """A trainer that saves after the first step of a round."""

    def __init__(self, name: str, layout: Layout, trainer: Any) -> None:
        super().__init__(name, layout, trainer)
        self.rounds: list[list[float]] = []

    def interval(self, steps: int, *, record: bool) -> None:
        """Take the steps of one round, the slowest rank's time for each."""
        checkpointer = self.trainer.checkpointer
        gc.collect()
        self._wait()
        seconds = []
        for number in range(steps):
            dist.barrier()
            start = time.perf_counter()
            self._step()
            if number == 0 and self.name != "never":
                checkpointer.save(self.trainer.step)
            self._wait()
            seconds.append(self._over_ranks(time.perf_counter() - start, dist.ReduceOp.MAX))
        # Of a save that is still being written the rest is paid before the next copy's turn.
        checkpointer.maybe_wait_for_saving()
        if record:
            self.rounds.append(seconds)


def job_of(job: Job, mode: str, folder: str) -> Job:
    """Return the job that saves in this way, into a folder of its own."""
    config = copy.deepcopy(job.config)
    config.parallelism.spmd_backend = SPMD_BACKEND
    config.dataloader = TrainData(dataset=RANDOM_TOKENS)
    config.hf_assets_path = ""
    config.training.steps = config.metrics.log_freq = 1_000_000
    config.metrics.enable_tensorboard = config.validator.enable = False
    config.dump_folder = str(Path(folder, mode))
    checkpoint = config.checkpoint
    checkpoint.enable, checkpoint.interval = mode != "never", 1
    checkpoint.keep_latest_k = 2
    checkpoint.async_mode = "async" if mode == "async" else "disabled"
    return dataclasses.replace(job, config=config)


def rows_of(savers: list[Saver]) -> list[dict[str, float | str]]:
    """Return the figures of each way of saving."""
    base = np.array(savers[0].rounds)
    usual = np.median(base, axis=1, keepdims=True)
    rows: list[dict[str, float | str]] = []
    for saver in savers:
        steps = np.array(saver.rounds)
        mean = steps.mean(axis=1) / base.mean(axis=1)
        rows.append(
            {
                "saving": saver.name,
                "step_ms": 1e3 * float(np.median(steps)),
                "mean_ratio": float(np.median(mean)),
                "mean_ratio_iqr": float(np.subtract(*np.percentile(mean, [75, 25]))),
                "first_step_ratio": float(np.median(steps[:, :1] / usual)),
                "second_step_ratio": float(np.median(steps[:, 1:2] / usual)),
                "worst_step_ratio": float(np.median((steps / usual).max(axis=1))),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the figures as text for people."""
    lines = [
        f"{'saving':<7} {'step ms':>8} {'mean':>6} {'IQR':>5} {'1st':>6} {'2nd':>6} {'worst':>6}"
        "   (ratios to the steps of the job that never saves, in the same round)"
    ]
    for row in rows:
        lines.append(
            f"{row['saving']:<7} {row['step_ms']:>8.1f} {row['mean_ratio']:>6.3f}"
            f" {row['mean_ratio_iqr']:>5.3f} {row['first_step_ratio']:>6.2f}"
            f" {row['second_step_ratio']:>6.2f} {row['worst_step_ratio']:>6.2f}"
        )
    return "\n".join(lines)


def run_rank(options: Options, job: Job, device: str) -> None:
    """One rank: build the trainers, let them take turns, print the result on rank 0."""
    rank, world_size, _ = quiet_rank()
    with stdout_for_results() as results:
        savers = []
        for mode in MODES:
            entry = job_of(job, mode, options.folder)
            check(entry, world_size, device)
            saver = Saver(mode, Layout(mode, 1, world_size, "always"), build(entry, device).build())
            saver.settle(PeakMemory())
            savers.append(saver)
        for number in range(-1, options.rounds):
            first = number % len(savers)
            for saver in [*savers[first:], *savers[:first]]:
                saver.interval(options.interval, record=number >= 0)
            if rank == 0:
                print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
        if rank == 0:
            rows = rows_of(savers)
            print(table(rows), file=results)
            if options.json:
                Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
        for saver in savers:
            saver.trainer.close()
        dist.destroy_process_group()
        if rank == 0:
            shutil.rmtree(options.folder)


def main() -> int:
    """Entry point. Exit status: 0, 1 failed, 2 bad arguments or config."""
    options = tyro.cli(Options, use_underscores=True)
    inside = "RANK" in os.environ
    try:
        if min(options.rounds, options.ranks) < 1 or options.interval < 2:
            raise ConfigError(
                "expected --rounds and --ranks of at least 1, --interval of at least 2"
            )
        if not inside and Path(options.folder).exists():
            raise ConfigError(f"--folder: {options.folder} is there, and would be deleted")
        job = load_job(["--config", options.config], quiet=True)
        world_size = int(os.environ["WORLD_SIZE"]) if inside else None
        ranks, device = find_ranks(options.ranks, job.config.device, world_size)
        if not inside:
            check(job_of(job, "sync", options.folder), ranks, device)
            become_torchrun(ranks, device, [__file__, *sys.argv[1:]])
        run_rank(options, job, device)
    except (ConfigError, PatchError) as e:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
