"""save_checkpoint and load_checkpoint in a loop of one's own."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchtitan_dmuon as dmuon
from tests.runtime.communication import argument, each_communication_at_length, run_world

WIDTH, BATCH, STEPS = 12, 12, 6
# Last weights, loss of each step, rates of the last step.
Result = tuple[dict[str, Any], list[float], list[float]]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def _schedule(kind: str, optimizer: dmuon.Muon) -> Any:
    if kind == "cosine":
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def loop(folder: str | None, first: int, last: int, kind: str) -> Result:
    """Go on from `folder` at step `first`, save after step `last`; the batch is the same for any
    number of ranks."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("r", "s")) if size > 1 else None
    options: Any = argument() if mesh is not None else {}
    owned = dmuon.dedicate_params(model, mesh, cost="model", **options)
    if mesh is not None:
        fully_shard(model, mesh=mesh, ignored_params=owned.parameters)
    optimizer = dmuon.Muon(model, lr=0.05, adamw_lr=0.01, ns_steps=2)
    schedule = _schedule(kind, optimizer)
    extra = {"schedule": schedule, "mine": {"seen": torch.zeros(2), "note": "start"}}
    if folder:
        assert dmuon.load_checkpoint(folder, model, optimizer, extra) == (first or None)
    losses = []
    for step in range(first + 1, last + 1):
        x, y = torch.randn(2, BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        mine = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
        loss = (model(x[mine]) - y[mine]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        extra["mine"]["seen"] += 1
        losses.append(loss.item())
        if folder and step == last:
            extra["mine"]["note"] = f"after {step}"
            dmuon.save_checkpoint(folder, step, model, optimizer, extra, keep=2)
    assert extra["mine"]["seen"].tolist() == [last, last]
    with dmuon.full_params(model):
        weights = {n: p.detach().numpy().copy() for n, p in model.layers.named_parameters()}
    dmuon.wait_for_publish(model)
    return weights, losses, [group["lr"] for group in optimizer.param_groups]


@each_communication_at_length
@pytest.mark.usefixtures("communication")
@pytest.mark.parametrize("kind", ["cosine", "lambda"])
def test_a_loop_of_ones_own_goes_on(kind: str, tmp_path: Path) -> None:
    """Two ranks stop and two go on: the very bits of an unbroken run, schedules that compute a
    rate from the one before included. One process goes on from two ranks within rounding."""
    whole = run_world(2, loop, None, 0, STEPS, kind)
    start = run_world(2, loop, str(tmp_path), 0, 4, kind)
    rest = run_world(2, loop, str(tmp_path), 4, STEPS, kind)
    for (weights, losses, rates), before, after in zip(whole, start, rest, strict=True):
        assert before[1] + after[1] == losses
        assert after[2] == rates
        assert all(np.array_equal(after[0][name], weights[name]) for name in weights)
    (tmp_path / "step-6").rename(tmp_path / "later")
    (alone,) = run_world(1, loop, str(tmp_path), 4, STEPS, kind)
    assert alone[2] == whole[0][2]
    for name, weight in whole[0][0].items():
        np.testing.assert_allclose(alone[0][name], weight, rtol=1e-4, atol=1e-5)


def test_mistakes_are_one_error(tmp_path: Path) -> None:
    """What `extra` may not be called, steps that are none, and a step that is not there."""
    model = Model()
    dmuon.dedicate_params(model, cost="model")
    optimizer = dmuon.Muon(model)
    assert dmuon.load_checkpoint(tmp_path / "none", model, optimizer) is None
    clash = "is taken by the model or its optimizer|is a name of the model or its optimizer"
    for name in ("rng", "layers", "a.b"):
        with pytest.raises(ValueError, match=f"extra: {name} ({clash})"):
            dmuon.save_checkpoint(tmp_path, 1, model, optimizer, {name: {}})
    with pytest.raises(ValueError, match="extra: epoch: expected a dict, or an object with"):
        dmuon.save_checkpoint(tmp_path, 1, model, optimizer, {"epoch": 3})
    with pytest.raises(ValueError, match=r"extra: d\.a: expected names for keys, got 1"):
        dmuon.save_checkpoint(tmp_path, 1, model, optimizer, {"d": {"a": {1: 2}}})
    with pytest.raises(dmuon.CheckpointError, match=r"d\.a \(float64\): it holds more than plain"):
        dmuon.save_checkpoint(tmp_path, 1, model, optimizer, {"d": {"a": np.float64(1)}})
    assert not list(tmp_path.glob("*.1"))
    with pytest.raises(ValueError, match="step: expected a whole number >= 0"):
        dmuon.save_checkpoint(tmp_path, -1, model, optimizer)
    path = dmuon.save_checkpoint(tmp_path, 1, model, optimizer)
    assert path == tmp_path / "step-1"
    with pytest.raises(dmuon.CheckpointError, match=r"no complete step-2; there are: step-1"):
        dmuon.load_checkpoint(tmp_path, model, optimizer, step=2)
    with pytest.raises(dmuon.CheckpointError, match=r"it lacks schedule\.\S+"):
        dmuon.load_checkpoint(tmp_path, model, optimizer, {"schedule": {"a": 1}})
    with pytest.raises(dmuon.CheckpointError, match=r"it lacks layers\.3"):
        other = Model()
        other.layers.append(nn.Linear(WIDTH, WIDTH))
        dmuon.dedicate_params(other, cost="model")
        dmuon.load_checkpoint(tmp_path, other, dmuon.Muon(other))
    with pytest.raises(dmuon.CheckpointError, match=r"expected the folder around it"):
        dmuon.load_checkpoint(path, model, optimizer)
    # A part that is not there, or not to be loaded, can be left out.
    more = {"schedule": {"a": 1}}
    assert dmuon.load_checkpoint(tmp_path, model, optimizer, more, exclude=["schedule"]) == 1


def test_a_name_lost_in_mid_commit_is_found(tmp_path: Path) -> None:
    """Killed between the two renames of a save, a job goes on from the old one: no fresh start."""
    model = Model()
    dmuon.dedicate_params(model, cost="model")
    optimizer = dmuon.Muon(model)
    dmuon.save_checkpoint(tmp_path, 3, model, optimizer).rename(tmp_path / "replaced.3")
    assert dmuon.load_checkpoint(tmp_path, model, optimizer) == 3


def test_saves_and_loads_say_size_time_and_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And what a later job does otherwise than the one that saved."""
    model = Model()
    dmuon.dedicate_params(model, cost="model")
    caplog.set_level("INFO", "torchtitan_dmuon")
    dmuon.save_checkpoint(tmp_path, 3, model, dmuon.Muon(model))
    dmuon.load_checkpoint(tmp_path, model, dmuon.Muon(model, momentum=0.9))
    saved, loaded, changed = (record.getMessage() for record in caplog.records)
    numbers = r"[\d.]+ MiB.* in [\d.]+ s; [\d.]+ MiB of memory retained"
    assert re.match(rf"saved {tmp_path}/step-3: {numbers}", saved)
    assert re.match(rf"loaded {tmp_path}/step-3: {numbers}", loaded)
    assert changed == "changed since the checkpoint: momentum 0.95 -> 0.9 (3 parameters)"


class Filling:
    """Has no state before its first step, as torch's optimizers."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_nothing_of_a_part_gets_lost(tmp_path: Path) -> None:
    """What was saved of an object that a fresh one does not ask for is an error, not a reset."""
    model = Model()
    dmuon.dedicate_params(model, cost="model")
    optimizer, mine = dmuon.Muon(model), Filling()
    mine.state["average"] = torch.ones(3)
    dmuon.save_checkpoint(tmp_path, 1, model, optimizer, {"mine": mine})
    lost = r"it has mine\.average, which this job has not"
    with pytest.raises(
        dmuon.CheckpointError, match=r"it has mine\.average, which this job has not"
    ):
        dmuon.load_checkpoint(tmp_path, model, optimizer, {"mine": Filling()})
    with pytest.raises(dmuon.CheckpointError, match=lost):
        dmuon.load_checkpoint(tmp_path, model, optimizer)
    assert dmuon.load_checkpoint(tmp_path, model, optimizer, exclude=["mine"]) == 1


def disagree(folder: str) -> str:
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("r", "s"))
    owned = dmuon.dedicate_params(model, mesh, cost="model")
    fully_shard(model, mesh=mesh, ignored_params=owned.parameters)
    with pytest.raises(dmuon.CheckpointError) as error:
        dmuon.save_checkpoint(folder, 1 + int(os.environ["RANK"]), model, dmuon.Muon(model))
    return str(error.value)


def test_ranks_that_disagree_on_the_step_say_so(tmp_path: Path) -> None:
    """At once, on all of them, and nothing is written."""
    one, other = run_world(2, disagree, str(tmp_path))
    assert one == other == "step: 2 on a rank and 1 on the first; ranks must agree"
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]
