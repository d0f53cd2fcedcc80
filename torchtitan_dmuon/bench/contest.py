"""Trainers that live in one world and take their training steps in turns."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NoReturn, TextIO

import torch
import torch.distributed as dist
from torchtitan.tools.utils import device_module

from torchtitan_dmuon.bench.layouts import Layout
from torchtitan_dmuon.bench.measure import PeakMemory, sent_bytes
from torchtitan_dmuon.config.checks import model_parallel
from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.config.manager import Job
from torchtitan_dmuon.config.schema import TrainData
from torchtitan_dmuon.data import RANDOM_TOKENS
from torchtitan_dmuon.optim.container import OwnerContainer
from torchtitan_dmuon.runtime.api import wait_for_publish
from torchtitan_dmuon.trainer import Trainer

SPMD_BACKEND: Final = "partial_dtensor"
"""One process holds the meshes of one spmd_types trainer only; here it has several trainers."""


def data_parallel_ranks(job: Job, ranks: int) -> int:
    """Return how many ranks see different samples. Raises ConfigError if the degrees do not fit."""
    per_sample = model_parallel(job)
    if per_sample < 1 or ranks % per_sample:
        raise ConfigError(
            f"{job.at('parallelism')}: {ranks} ranks are not a multiple of {per_sample}, the "
            "product of the tensor, context and pipeline degrees"
        )
    return ranks // per_sample


def job_of(job: Job, layout: Layout) -> Job:
    """Return the job in this layout, with random tokens, and without anything written or saved."""
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
    """One trainer that is ready to take steps.

    All methods are collective: every rank calls them in the same order.

    Attributes:
        name: What distinguishes it from the others.
        layout: Its layout.
        round_seconds: For each timed round, the seconds of the slowest rank.
        round_bytes: For each timed round, what all ranks sent; None where that is not known.
        peak_bytes, first_loss: What `settle` found.
        final_loss: Loss over all ranks of the last step that was asked to tell it.
    """

    def __init__(self, name: str, layout: Layout, trainer: Trainer) -> None:
        self.name = name
        self.layout = layout
        self.trainer = trainer
        self.round_seconds: list[float] = []
        self.round_bytes: list[int | None] = []
        self.peak_bytes = 0
        self.first_loss = float("nan")
        self.final_loss = float("nan")
        self._data = trainer.batch_generator(trainer.dataloader)
        trainer.metrics_processor.log = self._record

    def _record(self, step: int, global_avg_loss: float, *args: Any, **kwargs: Any) -> None:
        self.final_loss = global_avg_loss

    @property
    def pool_bytes(self) -> int:
        """Bytes of the symmetric pool on each rank; 0 without one."""
        optimizers = self.trainer.optimizers
        if not isinstance(optimizers, OwnerContainer):
            return 0
        return sum(optimizers.pool_bytes().values())

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step on all ranks together."""
        trainer, dims = self.trainer, self.trainer.parallel_dims
        training = trainer.config.training
        sequences = training.local_batch_size * dims.dp_replicate * dims.dp_shard
        return int(sequences * trainer.gradient_accumulation_steps * training.seq_len)

    def settle(self, memory: PeakMemory, steps: int = 3) -> None:
        """Take the first steps, in which state and line D's pool are made; note the memory of the
        heaviest rank.

        Args:
            memory: Opened before the trainer was built.
            steps: Number of steps.
        """
        self._step(tell_loss=True)
        self.first_loss = self.final_loss
        for _ in range(steps - 1):
            self._step()
        self._wait()
        self.peak_bytes = int(self._over_ranks(memory.grown_bytes(), dist.ReduceOp.MAX))

    def timed(self, steps: int, *, record: bool = True, tell_loss: bool = False) -> None:
        """Take consecutive steps, from a barrier to the end of all work on the slowest rank.

        Args:
            steps: Number of steps.
            record: Whether the round counts.
            tell_loss: Whether the last step's loss becomes `final_loss`: three scalars more to sum.
        """
        # What earlier steps left behind is collected outside the timed part.
        gc.collect(1)
        self._wait()
        dist.barrier()
        before = sent_bytes()
        start = time.perf_counter()
        for number in range(steps):
            self._step(tell_loss=tell_loss and number == steps - 1)
        self._wait()
        seconds = time.perf_counter() - start
        after = sent_bytes()
        seconds = self._over_ranks(seconds, dist.ReduceOp.MAX)
        known = before is not None and after is not None
        sent = self._over_ranks((after or 0) - (before or 0), dist.ReduceOp.SUM)
        if record:
            self.round_seconds.append(seconds)
            self.round_bytes.append(int(sent) if known else None)

    def _step(self, *, tell_loss: bool = False) -> None:
        # Not through log_freq: the config may be shared with other trainers.
        self.trainer.metrics_processor.should_log = lambda step: tell_loss
        self.trainer.step += 1
        self.trainer.train_step(self._data)

    def _wait(self) -> None:
        """Wait for all work of this trainer, a publish under way included."""
        if isinstance(self.trainer.optimizers, OwnerContainer):
            for model in self.trainer.model_parts:
                wait_for_publish(model)
        device_module.synchronize()

    def _over_ranks(self, value: float, op: Any) -> float:
        total = torch.tensor(value, dtype=torch.float64, device=self.trainer.device)
        dist.all_reduce(total, op)
        return float(total)


def compete(
    contenders: Sequence[Contender],
    *,
    rounds: int,
    warmup_rounds: int,
    steps_per_round: int,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Take all rounds, in an order that rotates by one each round.

    So a machine that slows down or speeds up meanwhile changes no ratio.
    """
    for number in range(-warmup_rounds, rounds):
        first = number % len(contenders)
        say(f"round {number + 1} of {rounds}" if number >= 0 else "warming up")
        for contender in [*contenders[first:], *contenders[:first]]:
            contender.timed(steps_per_round, record=number >= 0, tell_loss=number == rounds - 1)


@contextlib.contextmanager
def stdout_for_results() -> Iterator[TextIO]:
    """Yield the real stdout; whatever else is written there, by libraries too, goes to stderr."""
    with os.fdopen(os.dup(1), "w") as results:
        os.dup2(2, 1)
        yield results


def quiet_rank() -> tuple[int, int, int]:
    """Prepare a rank that torchrun has started. Returns rank, world size and number of nodes."""
    # A rank that waits for another in a collective does not run Python's handler.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s: %(message)s")
    # Our initialisation does not use DTensor's random operations.
    warnings.filterwarnings("ignore", message="DTensor .* may not have complete support on cpu")
    # What torch deprecates is for those who change this project, not for who compares.
    warnings.filterwarnings("ignore", category=FutureWarning)
    world_size = int(os.environ["WORLD_SIZE"])
    nodes = world_size // int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return int(os.environ["RANK"]), world_size, nodes


def become_torchrun(ranks: int, device: str, program: Sequence[str]) -> NoReturn:
    """Replace this process by torchrun with this many ranks of a program (a path, or -m module)."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    threads = 1 if device == "cuda" else max(1, (os.cpu_count() or 1) // ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # gloo warns in each process that it does an all-to-all as a gather; bytes_sent shows it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    os.execv(sys.executable, [sys.executable, *launcher, *program])
