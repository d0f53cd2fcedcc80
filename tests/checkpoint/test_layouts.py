"""Saved on one layout, resumed on another: the same bits after loading, the same training after.

Every layout trains four steps and saves after two and four. A pair goes on from the second step of
its first layout on its second, saves at once what it has loaded, and trains to the fourth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint import jobs
from tests.checkpoint.jobs import END, HALF, Done, Layout, Task, run_tasks, stored
from tests.worlds import run_world

ONE = Layout("owner", (1, 1))
DDP2, FSDP2 = Layout("owner", (2, 1), 2), Layout("owner", (1, 2))
FSDP3 = Layout("owner", (1, 3), 2)
DDP4, HSDP4 = Layout("owner", (4, 1), 2), Layout("owner", (2, 2))
FUSED4 = Layout("owner", (2, 2), 2, fused=True)
IDLE4, IDLE2 = Layout("owner", (1, 4), merged=True), Layout("owner", (2, 1), merged=True)
HSDP8 = Layout("owner", (4, 2))
B2, B4 = Layout("gather", (1, 2), 2), Layout("gather", (2, 2), fused=True)
A1, A2 = Layout("adamw", (1, 1), fused=True), Layout("adamw", (1, 2), 2)
A4 = Layout("adamw", (2, 2), fused=True)
T1, T2 = Layout("torch", (1, 1)), Layout("torch", (1, 2))

SOAP2 = Layout("owner", (1, 2), algorithm="soap")
SOAP4 = Layout("owner", (2, 2), 2, fused=True, algorithm="soap")
SHAMPOO1 = Layout("owner", (1, 1), fused=True, algorithm="shampoo")
SHAMPOO3 = Layout("owner", (1, 3), 2, algorithm="shampoo")
NORMUON2 = Layout("owner", (2, 1), 2, fused=True, algorithm="normuon")
NORMUON4 = Layout("owner", (2, 2), algorithm="normuon")

tensors = cache(jobs.tensors)  # checkpoints are read for several pairs

SAME_RULE = [
    (HSDP4, ONE),
    (ONE, HSDP4),
    (HSDP4, HSDP8),
    (HSDP8, DDP4),
    (HSDP8, ONE),
    (FSDP2, FSDP3),
    (FSDP3, FUSED4),
    (FUSED4, DDP4),
    (DDP4, B2),
    (IDLE4, IDLE2),
    (IDLE2, IDLE4),
    (B2, B4),
    (B4, ONE),
    (FUSED4, FSDP2),
    (HSDP4, DDP2),
    (DDP2, HSDP4),
    (A1, A4),
    (A4, A2),
    (A2, A1),
    (T1, T2),
]
OTHER_ALGORITHM = [
    (SOAP2, SOAP4),
    (SOAP4, SOAP2),
    (SHAMPOO1, SHAMPOO3),
    (SHAMPOO3, SHAMPOO1),
    (NORMUON2, NORMUON4),
    (NORMUON4, NORMUON2),
]
OTHER_RULE = [(A2, FUSED4), (FUSED4, A2), (A4, B2), (B2, T1), (T1, HSDP4), (HSDP4, A1)]
OTHER_RULE += [(HSDP4, SOAP2), (SOAP2, NORMUON4), (NORMUON4, B2), (SOAP4, A2)]

_DROPOUT = [
    Layout("owner", mesh, zero, dropout=0.1, fused=fused)
    for mesh, zero, fused in (
        ((2, 1), 2, False),
        ((1, 2), 2, False),
        ((1, 2), 3, True),
        ((2, 2), 2, False),
        ((2, 2), 3, False),
    )
]
# With pinned memory: needs an accelerator.
_MODES = ("disabled", "async", "disabled", "disabled", "async")
SAME_LAYOUT = [
    *zip(_DROPOUT, _MODES, strict=True),
    (Layout("gather", (1, 2), dropout=0.1), "disabled"),
    (Layout("adamw", (2, 2), 2, dropout=0.1, fused=True), "async"),
    (Layout("owner", (1, 1), dropout=0.1), "async"),
    (Layout("owner", (2, 2), dropout=0.1, fused=True, algorithm="soap"), "async"),
    (Layout("owner", (1, 2), dropout=0.1, algorithm="shampoo"), "disabled"),
    (Layout("owner", (2, 1), dropout=0.1, algorithm="normuon"), "disabled"),
]


@dataclass(frozen=True)
class Runs:
    """What all jobs did, and where their checkpoints are."""

    root: Path
    done: Mapping[str, list[Done]]

    def first(self, layout: Layout, step: int) -> Path:
        return self.root / layout.name / f"step-{step}"

    def then(self, source: Layout, target: Layout, step: int) -> Path:
        return self.root / _pair(source, target) / f"step-{step}"


def _pair(source: Layout, target: Layout) -> str:
    return f"{source.name}-to-{target.name}"


def _run(tasks: list[Task]) -> dict[str, list[Done]]:
    """Run the tasks of each size in a world of its own; return what each rank did, by folder."""
    done = {}
    for size in sorted({task.layout.size for task in tasks}):
        mine = tuple(task for task in tasks if task.layout.size == size)
        ranks = run_world(size, run_tasks, mine, timeout_seconds=120)
        for i, task in enumerate(mine):
            done[Path(task.folder).name] = [rank[i] for rank in ranks]
    return done


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("layouts")
    again = [(layout, layout) for layout, _ in SAME_LAYOUT]
    pairs = [*SAME_RULE, *OTHER_ALGORITHM, *OTHER_RULE, *again]
    sources = {layout: "disabled" for layout, _ in pairs} | dict(SAME_LAYOUT)
    first = [
        Task(layout, str(root / layout.name), async_mode=mode) for layout, mode in sources.items()
    ]
    then = [
        Task(target, str(root / _pair(source, target)), str(root / source.name / f"step-{HALF}"))
        for source, target in pairs
    ]
    return Runs(root, _run(first) | _run(then))


def _same_bits(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of tensors that are not the same, bit for bit."""
    assert one.keys() == other.keys()
    return [
        key
        for key, value in one.items()
        if value.dtype != other[key].dtype or not torch.equal(value, other[key])
    ]


def _id(value: Any) -> str:
    return value.name if isinstance(value, Layout) else str(value)


@pytest.mark.parametrize(("layout", "mode"), SAME_LAYOUT, ids=_id)
def test_the_same_layout_goes_on_bit_for_bit(layout: Layout, mode: str, runs: Runs) -> None:
    """Losses, weights, momenta, AdamW state, schedule, data position and random generators are
    those of the run that did not stop, for synchronous and asynchronous saving; dropout makes the
    generators matter. What training does while a save is under way does not reach it."""
    for unbroken, resumed in zip(
        runs.done[layout.name], runs.done[_pair(layout, layout)], strict=True
    ):
        assert resumed.losses == unbroken.losses[HALF:]
        assert resumed.rates == unbroken.rates
    before = stored(runs.first(layout, HALF))
    for one, other in (
        (before, stored(runs.then(layout, layout, HALF))),
        (stored(runs.first(layout, END)), stored(runs.then(layout, layout, END))),
    ):
        assert one.keys() == other.keys()
        for key, value in one.items():
            same = (
                torch.equal(value, other[key])
                if isinstance(value, torch.Tensor)
                else value == other[key]
            )
            assert same, key
    assert int(before["train_state.step"]) == before["dataloader.next"] == HALF


@pytest.mark.parametrize(("source", "target"), SAME_RULE, ids=_id)
def test_another_layout_goes_on_alike(source: Layout, target: Layout, runs: Runs) -> None:
    """Weights, momenta and AdamW state are the saved ones to the last bit after loading, on any
    number of ranks, with separate or fused projections, and where ranks own nothing. The steps
    after it are those of the unbroken run, but for the order of additions."""
    saved = tensors(runs.first(source, HALF))
    assert not _same_bits(saved, tensors(runs.then(source, target, HALF)))
    unbroken, resumed = runs.done[source.name][0], runs.done[_pair(source, target)][0]
    assert resumed.losses == pytest.approx(unbroken.losses[HALF:], rel=1e-4)
    assert resumed.rates == unbroken.rates
    there, here = tensors(runs.first(source, END)), tensors(runs.then(source, target, END))
    # torch.optim.Muon rounds its update to bfloat16.
    tolerance = 1e-2 if source.mode == "torch" else 1e-4
    for key, value in there.items():
        moved = (value - saved[key]).norm()
        apart = (here[key] - value).norm()
        assert apart <= tolerance * moved, f"{key}: {apart / moved:.1e}"


@pytest.mark.parametrize(("source", "target"), OTHER_ALGORITHM, ids=_id)
def test_state_of_every_algorithm_moves_between_layouts(
    source: Layout, target: Layout, runs: Runs
) -> None:
    """Elementwise state and that of whole matrices (of experts, and of Q, K and V, fused or not) is
    the saved one to the last bit on other owners, and there is some of both kinds."""
    saved = tensors(runs.first(source, HALF))
    assert not _same_bits(saved, tensors(runs.then(source, target, HALF)))
    own = {k: v for k, v in saved.items() if f".{source.algorithm}_" in k and v.any()}
    for part in ("layers.1.attention.qkv.wq.weight", "layers.1.attention.qkv.wk.weight"):
        assert len({v.shape for k, v in own.items() if part in k}) > 1, part
    kinds = {v.ndim for k, v in own.items() if ".layers.1.ffn.up" in k}
    # SOAP's moments are in a basis of their matrix: nothing of its is elementwise.
    assert kinds >= ({0, 2} if source.algorithm == "soap" else {2, 3})
    unbroken, resumed = runs.done[source.name][0], runs.done[_pair(source, target)][0]
    # Eigenvectors of near eigenvalues turn with the last bit of a sum, so not to the last digit.
    assert resumed.losses == pytest.approx(unbroken.losses[HALF:], rel=1e-2)
    assert resumed.rates == unbroken.rates


def test_layouts_train_alike(runs: Runs) -> None:
    """The unbroken runs that the pairs are compared with are one algorithm."""
    one = runs.done[ONE.name][0].losses
    for layout in (DDP2, FSDP2, FSDP3, DDP4, HSDP4, FUSED4, B2, B4):
        assert runs.done[layout.name][0].losses == pytest.approx(one, rel=1e-5), layout
    assert one[-1] < one[0] - 0.1


@pytest.mark.parametrize(("source", "target"), OTHER_RULE, ids=_id)
def test_another_optimizer_keeps_what_it_can(source: Layout, target: Layout, runs: Runs) -> None:
    """Between AdamW, torch's Muon, owners and gathered matrices: the weights are the saved ones to
    the last bit, and so is the state of what is still updated by the same rule. State of another
    rule starts at zero, and the log says for how many parameters."""
    saved, loaded = (
        tensors(runs.first(source, HALF), optimizer=False),
        tensors(runs.then(source, target, HALF), optimizer=False),
    )
    assert not _same_bits(saved, loaded)
    saved = tensors(runs.first(source, HALF), model=False)
    loaded = tensors(runs.then(source, target, HALF), model=False)
    kept = {key: value for key, value in loaded.items() if key in saved}
    assert not _same_bits({key: saved[key] for key in kept}, kept)
    rest = {key: value for key, value in loaded.items() if key not in saved}
    assert all(not value.any() for value in rest.values())
    assert any("tok_embeddings" in key for key in kept)
    alike = source.algorithm == target.algorithm == "muon"
    if alike and {source.mode, target.mode} <= {"torch", "owner", "gather"}:
        assert "optimizer.state.layers.0.ffn.w1.weight.momentum_buffer" in kept
    # State of one matrix of a stack is that of its parameter.
    fresh = {key.rpartition(".")[0].partition("[")[0] for key in rest}
    assert fresh
    (line,) = [line for line in runs.done[_pair(source, target)][0].lines if "starts fresh" in line]
    assert f"{len(fresh)} parameters" in line
    assert runs.done[_pair(source, target)][0].losses[-1] < runs.done[source.name][0].losses[0]


def test_ranks_that_own_nothing_were_there(runs: Runs) -> None:
    """The pairs with merged owners have ranks that write no tensor of the layers."""
    from torchtitan_dmuon.checkpoint.archive import Archive

    index = Archive.open(runs.first(IDLE4, HALF)).index
    writers = {
        info.relative_path
        for key, info in index.storage_data.items()
        if key.fqn.startswith(("layers.", "optimizer.state.layers."))
    }
    everyone = {info.relative_path for info in index.storage_data.values()}
    assert len(writers) == 2 and len(everyone) == IDLE4.size
