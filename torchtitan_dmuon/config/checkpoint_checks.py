"""What a job says of its checkpoints, and whether the one that it would load is whole."""

from __future__ import annotations

from pathlib import Path

from torchtitan_dmuon.checkpoint.archive import Archive
from torchtitan_dmuon.checkpoint.errors import CheckpointError
from torchtitan_dmuon.checkpoint.folder import CheckpointFolder
from torchtitan_dmuon.checkpoint.planners import OPTIMIZER, RANDOM
from torchtitan_dmuon.config.errors import ConfigError, nearest
from torchtitan_dmuon.config.manager import Job

_PARTS = (OPTIMIZER, "lr_scheduler", "dataloader", "train_state", RANDOM)
"""Parts of a checkpoint that a job need not load."""


def check_checkpoint(job: Job, world_size: int, device: str) -> None:
    """Raise ConfigError for what would fail at the first load or save. Changes nothing on disk.

    Args:
        job: The resolved job.
        world_size: Ranks of the whole job.
        device: "cuda" or "cpu", what the ranks run on.
    """
    c = job.config.checkpoint
    if c.create_seed_checkpoint and (world_size != 1 or not c.enable):
        raise ConfigError(
            f"{job.at('checkpoint.create_seed_checkpoint')}: a seed checkpoint is made by one rank "
            "with checkpoint.enable = true; set NGPU=1 and all degrees to 1"
        )
    if not c.enable:
        return
    places = {
        "checkpoint.folder": c.folder,
        "checkpoint.initial_load_path": c.initial_load_path or "",
        "dump_folder": job.config.dump_folder,
    }
    for key, value in places.items():
        if "://" in value:
            raise ConfigError(
                f"{job.at(key)}: expected a folder that all nodes see, got {value}; object stores "
                "cannot rename a checkpoint as one"
            )
    for name in c.exclude_from_loading:
        if name not in _PARTS:
            raise ConfigError(
                f"{job.at('checkpoint.exclude_from_loading')}: unknown part '{name}'"
                f"{nearest(name, _PARTS) or ';'} expected some of {', '.join(_PARTS)}"
            )
    if c.async_mode == "async_with_pinned_mem" and device == "cpu":
        raise ConfigError(
            f"{job.at('checkpoint.async_mode')}: memory is pinned for GPUs; expected "
            '"async" or "disabled" on CPUs'
        )
    folder = Path(job.config.dump_folder, c.folder)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{job.at('checkpoint.folder')}: {folder} is not a folder")
    there = CheckpointFolder(folder).complete()
    if c.create_seed_checkpoint and there:
        raise ConfigError(
            f"{job.at('checkpoint.create_seed_checkpoint')}: {folder} has step-{there[-1]} "
            "already; set another dump_folder"
        )
    step = _step_to_load(job, folder)
    if step is not None:
        _check_whole(job, "load_step", CheckpointFolder(folder).at(step))
        if step > job.config.training.steps:
            raise ConfigError(
                f"{job.at('training.steps')}: {folder} has step-{step} already; expected at least "
                f"{step}, got {job.config.training.steps}; or set another dump_folder, or "
                "checkpoint.load_step to an earlier one"
            )
    elif c.initial_load_path and not c.initial_load_in_hf:
        _check_whole(job, "initial_load_path", Path(c.initial_load_path))


def _step_to_load(job: Job, folder: Path) -> int | None:
    c = job.config.checkpoint
    checkpoints = CheckpointFolder(folder)
    complete, exported = checkpoints.complete(), checkpoints.exports()
    if checkpoints.lost_names():
        return None  # the first rank gives them back their names, and then looks
    newest = c.load_step if c.load_step != -1 else max([*exported, *complete], default=None)
    if newest in exported:
        last = f"--checkpoint.load_step {max(complete)}" if complete else "another dump_folder"
        raise ConfigError(
            f"{job.at('checkpoint.load_step')}: {exported[newest]} is a model-only export "
            f"and cannot be continued; use {last}"
        )
    if newest is not None and newest not in complete:
        there = ", ".join(f"step-{s}" for s in complete) or "none"
        raise ConfigError(
            f"{job.at('checkpoint.load_step')}: no step-{newest} in {folder}; found {there}"
        )
    return newest


def _check_whole(job: Job, key: str, path: Path) -> None:
    try:
        Archive.open(path)
    except CheckpointError as e:
        remedy = ""
        if key == "load_step":
            steps = CheckpointFolder(path.parent).complete()
            older = [s for s in steps if path.name != f"step-{s}"]
            remedy = f"; --checkpoint.load_step {older[-1]} goes on from another" if older else ""
        raise ConfigError(f"{job.at(f'checkpoint.{key}')}: {e}{remedy}") from e
