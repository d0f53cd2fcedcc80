"""Training end to end on gloo ranks: layouts agree, the loss falls, resuming is exact."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.worlds import run_world
from torchtitan_dmuon.config.schema import torch_knows_spmd_types

LAYOUTS = ["ddp", "fsdp_z3", "hsdp_z2"]
SMALL = ["--training.seq_len", "64", "--metrics.log_freq", "1", "--lr_scheduler.warmup_steps", "2"]


def _trainer(arguments: list[str]) -> Any:
    """Build the trainer of a job on this rank, the way train.py does."""
    from torchtitan.tools.utils import device_type

    from torchtitan_dmuon.config.build import build
    from torchtitan_dmuon.config.checks import check
    from torchtitan_dmuon.config.manager import load_job
    from torchtitan_dmuon.log import init_console

    init_console(int(os.environ["RANK"]))
    job = load_job(arguments)
    check(job, int(os.environ["WORLD_SIZE"]), device_type)
    trainer = build(job, device_type).build()
    losses: list[float] = []
    log = trainer.metrics_processor.log

    def recording(step: int, loss: float, *args: Any, **kwargs: Any) -> None:
        losses.append(loss)
        log(step, loss, *args, **kwargs)

    trainer.metrics_processor.log = recording
    trainer.losses = losses
    return trainer


def train_job(arguments: list[str]) -> list[float]:
    """Train a job on this rank; return its losses, step by step."""
    trainer = _trainer(arguments)
    trainer.train()
    trainer.close()
    losses: list[float] = trainer.losses
    return losses


def _train(size: int, job: list[str]) -> list[float]:
    """Train a job in a world of its own (spmd_types keeps the meshes of a process's first job)."""
    by_rank = run_world(size, train_job, job, timeout_seconds=120)
    assert all(losses == by_rank[0] for losses in by_rank if losses)
    return by_rank[0]


def _job(layout: str, dump: Path, *arguments: str) -> list[str]:
    return ["--config", f"debug_{layout}.toml", "--dump_folder", str(dump), *SMALL, *arguments]


@pytest.fixture(scope="module")
def seed_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of freshly initialised weights, made by one rank."""
    folder = tmp_path_factory.mktemp("seed")
    run_world(1, make_seed, str(folder), timeout_seconds=120)
    return folder / "checkpoint" / "step-0"


def make_seed(folder: str) -> None:
    """Save step 0 of the debug model with one rank."""
    trainer = _trainer(
        ["--config", "debug.toml", "--dump_folder", folder, "--checkpoint.enable"]
        + ["--checkpoint.create_seed_checkpoint", "--debug.seed", "7"]
    )
    trainer.checkpointer.save(curr_step=0, last_step=True)
    trainer.close()


@pytest.mark.long
def test_layouts_train_to_the_same_losses(seed_checkpoint: Path, tmp_path: Path) -> None:
    """DDP, FSDP and HSDP, ZeRO-2 and ZeRO-3, are one algorithm: 6 steps from one seed checkpoint
    agree within 1e-4 relative, and the seed checkpoint is what they start from."""
    load = ["--checkpoint.enable", "--checkpoint.initial_load_path", str(seed_checkpoint)]
    load += ["--checkpoint.load_only", "--training.steps", "6"]
    losses = {layout: _train(4, _job(layout, tmp_path / layout, *load)) for layout in LAYOUTS}
    reference = losses["ddp"]
    assert len(reference) == 6
    assert reference[-1] < reference[0] - 0.1
    for layout in LAYOUTS:
        assert losses[layout] == pytest.approx(reference, rel=1e-4), layout
    # A fresh start from seed 42 differs: the checkpoint (seed 7) was really loaded.
    fresh = _train(4, _job("ddp", tmp_path / "x", "--training.steps", "1"))
    assert abs(fresh[0] - reference[0]) > 1e-3


@pytest.mark.long
def test_world_size_does_not_change_the_run(tmp_path: Path) -> None:
    """The same global batch on 1, 2 and 3 x accumulation gives the same losses: initial weights
    and data order depend on the seed alone."""
    common = ["--training.steps", "4", "--training.global_batch_size", "12", *SMALL]
    common += ["--config", "debug.toml"]
    runs = {}
    for size, local in ((1, 4), (2, 3), (3, 4)):
        job = [*common, "--training.local_batch_size", str(local)]
        job += ["--dump_folder", str(tmp_path / str(size))]
        runs[size] = _train(size, job)
    assert runs[2] == pytest.approx(runs[1], rel=1e-4)
    assert runs[3] == pytest.approx(runs[1], rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["hsdp_z2", "fsdp_z3"])
def test_resume_continues_bit_for_bit(layout: str, tmp_path: Path) -> None:
    """Stopping after step 3 and starting again gives the very losses of an unbroken run: weights,
    optimizer, schedule and data position all come back."""
    whole = _job(layout, tmp_path / "whole", "--training.steps", "6")
    save = ["--checkpoint.enable", "--checkpoint.interval", "3", "--lr_scheduler.total_steps", "6"]
    first = _job(layout, tmp_path / "parts", "--training.steps", "3", *save)
    second = _job(layout, tmp_path / "parts", "--training.steps", "6", *save)
    unbroken, start, rest = (_train(4, job) for job in (whole, first, second))
    assert start == unbroken[:3]
    assert rest == unbroken[3:]


def test_data_that_end_are_said_and_saved(tmp_path: Path) -> None:
    """Without `infinite` training stops with the data, all ranks after the same step, and the
    last state is saved although its step is not a multiple of the interval."""
    text = tmp_path / "text"
    text.mkdir()
    for number in range(30):
        (text / f"{number:02d}.txt").write_text(f"{number} the quick brown fox. " * 40)
    job = _job("ddp", tmp_path / "out", "--training.steps", "500", "--dataloader.infinite=false")
    job += ["--dataloader.dataset", str(text), "--dataloader.cache_folder", str(tmp_path / "cache")]
    job += ["--tokenizer.vocab_size", "300", "--checkpoint.enable", "--checkpoint.interval", "500"]
    job += ["--parallelism.data_parallel_replicate_degree", "2"]
    losses = _train(2, job)
    assert 2 <= len(losses) < 500
    steps = [p.name for p in (tmp_path / "out" / "checkpoint").glob("[!.]*")]
    assert steps == [f"step-{len(losses)}"]


@pytest.mark.skipif(
    not torch_knows_spmd_types(),
    reason="spmd_types needs torch 2.14 or newer: scripts/test.sh --torch 2.14.1",
)
@pytest.mark.parametrize("layout", ["ddp", "hsdp_z2"])
def test_spmd_backends_agree(layout: str, tmp_path: Path) -> None:
    """On a torch that has both, partial_dtensor and spmd_types train to the same losses."""
    jobs = []
    for backend in ("partial_dtensor", "spmd_types"):
        job = _job(layout, tmp_path / backend, "--training.steps", "4")
        jobs.append([*job, "--parallelism.spmd_backend", backend])
    partial, typed = (_train(4, job) for job in jobs)
    assert typed == pytest.approx(partial, rel=1e-5)


@pytest.mark.parametrize("name", ["llama3", pytest.param("qwen3", marks=pytest.mark.long)])
def test_titan_models_train(name: str, tmp_path: Path) -> None:
    """torchtitan's own decoders train through the same configs."""
    job = _job("fsdp_z2", tmp_path, "--training.steps", "3", "--model.name", name)
    job += ["--model.flavor", "debugmodel", "--parallelism.data_parallel_shard_degree", "2"]
    losses = _train(2, job)
    assert losses[-1] < losses[0]
