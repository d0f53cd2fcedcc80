"""A small job that is killed again and again, in forked worlds: the fast form of the kill loop.

The job saves every step. One rank gets SIGKILL or SIGSTOP at a random moment; the next world goes
on from the newest complete checkpoint.
"""

from __future__ import annotations

import os
import random
import signal
import time
import zlib
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.runtime.plain import Stack, dedicate, open_world
from tests.worlds import World
from torchtitan_dmuon.checkpoint.archive import Archive
from torchtitan_dmuon.checkpoint.folder import CheckpointFolder

AIMS = ("step", "save", "commit", "delete", "load")
"""What a job is doing when it loses a rank."""

LIMIT = 4.0
"""Time-out of the job, in seconds."""

SLOW = 10.0
"""What a busy machine may add to a limit, in seconds."""


class Count:
    """A number that is saved."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@dataclass(frozen=True)
class Plan:
    """What a job is told.

    Attributes:
        folder: Of its checkpoints.
        mesh: (replicate, shard).
        mode: Of saving: disabled, async, async_with_pinned_mem.
        steps: The last one.
        keep: How many checkpoints are kept.
    """

    folder: str
    mesh: tuple[int, int] = (2, 1)
    mode: str = "disabled"
    steps: int = 30
    keep: int = 2


def train(plan: Plan) -> int | None:
    """Train to the last step, from the newest checkpoint on. Returns the step it began at."""
    from torchtitan.components.optimizer import LRSchedulersContainer

    from torchtitan_dmuon.checkpoint.manager import CheckpointManager
    from torchtitan_dmuon.optim.container import OwnerContainer

    mesh = open_world(plan.mesh, LIMIT)
    for seeding in (torch.manual_seed, random.seed, np.random.seed):
        seeding(0)
    model = Stack(3)
    dedicate(model, mesh, timeout=timedelta(seconds=LIMIT))
    options = OwnerContainer.Config(adamw_lr=3e-3, options={"lr": 0.02, "ns_dtype": "float32"})
    optimizers = OwnerContainer(options, model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=4, total_steps=plan.steps).build(
        optimizers=optimizers, training_steps=plan.steps
    )
    progress, data = Count(), Count()
    manager = CheckpointManager(
        CheckpointManager.Config(
            enable=True,
            interval=1,
            keep_latest_k=plan.keep,
            initial_load_model_only=False,
            folder=plan.folder,
            async_mode=plan.mode,
            last_save_model_only=False,
        ),
        dataloader=data,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": progress},
        sd_adapter=None,
    )
    manager.introduce({}, tokenizer=None, timeout=timedelta(seconds=LIMIT))
    began = progress.value if manager.load() else None
    while progress.value < plan.steps:
        seed = 1000 * data.value + dist.get_rank()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        optimizers.zero_grad()
        model(x).square().sum().backward()
        manager.maybe_wait_for_staging()
        optimizers.step()
        schedulers.step()
        data.value += 1
        progress.value += 1
        manager.save(progress.value, last_step=progress.value == plan.steps)
    manager.close()
    return began


@dataclass
class Kill:
    """One kill and what came of it.

    Attributes:
        aim: What the job was to be doing.
        rank: Who was killed.
        hang: Whether it was stopped and not killed.
        moment: What lay in the folder besides checkpoints.
        seconds: Until the last of the others had ended.
        words: Last line of what each of the others raised.
        newest: Newest complete checkpoint afterwards.
        checkpoints: All complete ones.
    """

    aim: str
    rank: int
    hang: bool = False
    moment: str = ""
    seconds: float = 0.0
    words: dict[int, str] = field(default_factory=dict)
    newest: int | None = None
    checkpoints: list[int] = field(default_factory=list)


def contents(path: Path) -> dict[str, bytes]:
    """Read a checkpoint whole, each item against its checksum."""
    archive = Archive.open(path)
    checksums = archive.checksums
    assert checksums, f"{path} has no checksums"
    found = {}
    for index, info in archive.index.storage_data.items():
        with (path / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            data = file.read(info.length)
        assert zlib.crc32(data) == checksums[info.relative_path, info.offset], f"{path}: {index}"
        found[f"{index.fqn} {index.offset}"] = data
    return found


def _reach(folder: Path, kill: Kill, newest: int, draw: random.Random, world: World) -> None:
    """Wait for the moment of a kill."""
    deadline = time.monotonic() + 60
    checkpoints = CheckpointFolder(folder)

    def until(found: Any) -> None:
        while not found():
            assert time.monotonic() < deadline, f"{kill.aim}: it did not come to that"
            ended = wait(world.pipes, 0)
            assert not ended, f"{kill.aim}: the job has ended: {ended[0].recv()[1]}"  # type: ignore[union-attr]
            time.sleep(0.0005)

    if kill.aim == "load":
        lock = folder / ".lock"
        before = lock.read_text() if lock.exists() else ""
        until(lambda: lock.exists() and lock.read_text() != before)
        time.sleep(draw.uniform(0.0, 0.1))
        return
    past = newest + draw.randint(1, 3)
    until(lambda: max(checkpoints.complete(), default=0) >= past)
    if kill.aim == "save":
        until(lambda: any(folder.glob("saving.*")))
        time.sleep(draw.uniform(0.0, 0.03))
    elif kill.aim == "commit":
        until(lambda: any(folder.glob("saving.*/.metadata*")))
        time.sleep(draw.uniform(0.0, 0.002))
    elif kill.aim == "delete":
        until(lambda: any(folder.glob("deleting.*")))
    else:
        time.sleep(draw.uniform(0.0, 0.06))


def kill_once(plan: Plan, kill: Kill, newest: int, draw: random.Random) -> None:
    """Run the job, lose a rank, and see that the others end in time and the folder is whole."""
    folder = Path(plan.folder)
    size = plan.mesh[0] * plan.mesh[1]
    world = World(size, train, plan, timeout_seconds=LIMIT)
    try:
        _reach(folder, kill, newest, draw, world)
        os.kill(world.ranks[kill.rank].pid, signal.SIGSTOP if kill.hang else signal.SIGKILL)
        start = time.monotonic()
        kill.moment = ", ".join(sorted(p.name for p in folder.glob("[a-z]*.*")))
        others = {rank for rank in range(size) if rank != kill.rank}
        while others - kill.words.keys():
            left = {world.pipes[r]: r for r in others - kill.words.keys()}
            ready = wait(list(left), 4 * LIMIT + SLOW)
            assert ready, f"ranks {sorted(left.values())} did not end: {kill}"
            for pipe in ready:
                kind, text = pipe.recv()  # type: ignore[union-attr]
                assert kind == "error", f"a rank ended as if nothing had been: {kill}"
                kill.words[left[pipe]] = text.strip().splitlines()[-1]  # type: ignore[index]
        kill.seconds = time.monotonic() - start
    finally:
        world.end()
    found = CheckpointFolder(folder)
    kill.checkpoints = found.complete()
    kill.newest = max(kill.checkpoints, default=None)
    assert found.torn() == [], f"named like a checkpoint, and torn: {kill}"
    for step in kill.checkpoints:
        contents(found.at(step))
    assert (kill.newest or 0) >= newest, f"step-{newest} is lost: {kill}"
