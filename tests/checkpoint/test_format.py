"""What a checkpoint holds, who wrote it, and what else reads it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from tests.checkpoint.jobs import (
    Job,
    Layout,
    Lines,
    build_model,
    open_world,
    place,
    stored,
    tensors,
)
from tests.worlds import pack, run_world, unpack
from torchtitan_dmuon.checkpoint.archive import Archive
from torchtitan_dmuon.checkpoint.held import HeldTensor
from torchtitan_dmuon.checkpoint.state import ModelState, owner_state
from torchtitan_dmuon.models.fused_qkv import fused_qkv_parts

ONE = Layout("owner", (1, 1))
HSDP = Layout("owner", (2, 2), fused=True)


def _weights(job: Job) -> dict[str, torch.Tensor]:
    """Return all weights in full, as the model has them now. Collective."""
    import torchtitan_dmuon as dmuon
    from torchtitan_dmuon.runtime.site import canonical_name

    with dmuon.full_params(job.model), torch.no_grad():
        return {
            canonical_name(name): (p.full_tensor() if isinstance(p, DTensor) else p).clone()
            for name, p in job.model.named_parameters()
        }


# -- one checkpoint of owners, looked at from all sides -------------------------------------------


def save_and_look(folder: str) -> bytes:
    """Save; return weights and owned momenta as the model and optimizer have them, and what was
    asked of other ranks and of memory to make the state."""
    open_world()
    job = Job(HSDP, folder).train(2)
    optimizer, runtime = job.optimizers.optimizers[0], job.owned.runtime
    runtime.wait_for_publish()
    calls = Counter[str]()
    originals: dict[str, Callable[..., Any]] = {}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return originals[name](*args, **kwargs)

        return call

    for name in ("broadcast", "all_reduce", "all_gather", "all_gather_into_tensor", "reduce"):
        originals[name] = getattr(dist, name)
        setattr(dist, name, counted(name))
    runtime.traffic.keep = True
    parts = fused_qkv_parts(job.model)
    state = {**ModelState(job.model, parts).state_dict(), **owner_state(optimizer, parts)}
    for name, original in originals.items():
        setattr(dist, name, original)
    live = {
        t.untyped_storage().data_ptr()
        for group in runtime.groups
        for t in [
            *group.masters.values(),
            *(v for e in group.parameters for v in optimizer.state[e.parameter].values()),
        ]
    }
    held = [t for v in state.values() if isinstance(v, HeldTensor) for _, t in v.boxes]
    copied = [t for t in held if t.untyped_storage().data_ptr() not in live]
    job.manager.save(2)
    moved = [record for record in runtime.traffic.records if record]
    names = {
        parameter: name
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }
    momenta = {
        f"{names[p]}/{key}": value.clone()
        for p, entries in optimizer.state.items()
        for key, value in entries.items()
        if not isinstance(value, DTensor)
    }
    mine = sum(t.numel() for t in held)
    weights = _weights(job)
    job.close()
    return pack((weights, momenta, dict(calls), len(copied), mine, moved))


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("format") / "c"
    return folder / "step-2", [unpack(d) for d in run_world(4, save_and_look, str(folder))]


def _split(name: str, fused: torch.Tensor) -> dict[str, torch.Tensor]:
    """Cut a fused query-key-value tensor as the model's forward does: for each of the 2 KV heads
    its 2 queries, its key and its value, of 8 rows each."""
    heads = fused.view(2, 4, 8, *fused.shape[1:])
    pieces = {"wq": heads[:, :2], "wk": heads[:, 2], "wv": heads[:, 3]}
    return {name.replace("wqkv", k): v.reshape(-1, *fused.shape[1:]) for k, v in pieces.items()}


def test_weights_and_momenta_are_what_the_job_has(looked: tuple[Path, list[Any]]) -> None:
    """Bit for bit, under plain names and full shapes; a fused weight as wq, wk and wv, and its
    momentum too."""
    path, ranks = looked
    found = stored(path)
    expected = dict(ranks[0][0])
    for name in [n for n in expected if "wqkv" in n]:
        expected |= _split(name, expected.pop(name))
    weights = tensors(path, optimizer=False)
    assert weights.keys() - expected.keys() == {"layers.1.ffn.calls"}
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name
    seen = 0
    for _, momenta, *_ in ranks:
        for key, value in momenta.items():
            name, entry = key.split("/")
            if entry.startswith("momentum_buffer."):
                stack = found[f"optimizer.state.{name}.momentum_buffer"]
                assert torch.equal(stack[int(entry[16:])].flatten(), value.flatten()), key
                seen += 1
                continue
            for part, piece in (
                _split(name, value) if "wqkv" in name and value.ndim else {}
            ).items():
                assert torch.equal(found[f"optimizer.state.{part}.{entry}"], piece), part
            if "wqkv" not in name:
                assert torch.equal(found[f"optimizer.state.{name}.{entry}"], value), key
            seen += 1
    assert seen > 20


def test_each_tensor_is_written_once(looked: tuple[Path, list[Any]]) -> None:
    """The stored boxes of a tensor are all of it and nothing twice, and the stored bytes are those
    of the tensors: what several rows hold is written by one of them."""
    path, _ = looked
    archive = Archive.open(path)
    for name, meta in archive.index.state_dict_metadata.items():
        if isinstance(meta, TensorStorageMetadata):
            count = torch.zeros(meta.size)
            for chunk in meta.chunks:
                box = count
                for d, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                    box = box.narrow(d, offset, size)
                box += 1
            assert torch.equal(count, torch.ones(meta.size)), name
    items = Counter((key.fqn, key.offset) for key in archive.index.storage_data)
    assert set(items.values()) == {1}
    files = {p.name: p.stat().st_size for p in path.glob("*.distcp")}
    assert sum(files.values()) == archive.bytes
    # Each item is an archive of torch.save's, about a kilobyte around the numbers.
    numbers = sum(
        math.prod(m.size) * m.properties.dtype.itemsize
        for m in archive.index.state_dict_metadata.values()
        if isinstance(m, TensorStorageMetadata)
    )
    assert 0 < sum(files.values()) - numbers < 4000 * len(archive.index.storage_data)


def test_owners_write_their_matrices_in_one_piece(looked: tuple[Path, list[Any]]) -> None:
    """A matrix, its momentum, and one expert of a stack are one box each in the file of the rank
    that has the momentum; several ranks write."""
    path, ranks = looked
    index = Archive.open(path).index
    files = {(k.fqn, tuple(k.offset or ())): v.relative_path for k, v in index.storage_data.items()}
    owners = {
        key.split("/")[0]: rank
        for rank, (_, momenta, *_) in enumerate(ranks)
        for key in momenta
        if key.endswith("/momentum_buffer")
    }
    assert len(set(owners.values())) > 1 and "layers.0.ffn.w1.weight" in owners
    for name, rank in owners.items():
        if "wqkv" not in name:
            for key in (name, f"optimizer.state.{name}.momentum_buffer"):
                assert len(index.state_dict_metadata[key].chunks) == 1
                assert files[key, (0, 0)] == f"__{rank}_0.distcp"
    experts = {
        int(key[-1]): rank
        for rank, (_, momenta, *_) in enumerate(ranks)
        for key in momenta
        if re.search(r"ffn\.up/momentum_buffer\.\d$", key)
    }
    for expert, rank in experts.items():
        assert files["layers.1.ffn.up", (expert, 0, 0)] == f"__{rank}_0.distcp"


def test_saving_gathers_nothing(looked: tuple[Path, list[Any]]) -> None:
    """The state is made without communication and without copies, by all ranks together it is one
    model and one optimizer, and a save moves no weights between ranks."""
    path, ranks = looked
    for _, _, calls, copied, _, moved in ranks:
        assert calls == {} and copied == 0 and moved == []
    found = tensors(path)
    owned = [
        value
        for key, value in found.items()
        if "layers." in key and not key.endswith((".step", "calls"))
    ]
    total = sum(rank[4] for rank in ranks)
    steps = sum(key.endswith(".step") and ".layers." in key for key in found)
    assert total == sum(value.numel() for value in owned) + steps
    assert all(rank[4] < 0.6 * total for rank in ranks)


def test_the_manifest_says_what_it_is(looked: tuple[Path, list[Any]]) -> None:
    """Settings of each parameter, by name."""
    manifest = Archive.open(looked[0]).manifest
    assert manifest is not None and manifest["step"] == 2 and manifest["format"] == 1
    by_name = {name: options for options, names in manifest["settings"] for name in names}
    assert by_name["layers.0.ffn.w1.weight"]["lr"] == 0.02
    assert by_name["norm.weight"]["lr"] == 3e-3


# -- the copies of leaders -----------------------------------------------------------------------


def load_over_poison(path: str, seed: str) -> list[tuple[float, float]]:
    """Spoil masters and copies, load, and go forward at once; return the losses of one batch."""
    open_world()
    losses = []
    for zero, source in ((2, path), (3, path), (3, seed)):
        layout = Layout("owner", (2, 2), zero)
        whole = {"initial_load_model_only": source == seed}
        job = Job(layout, f"{path}-{zero}", seed=5, initial_load_path=source, **whole)
        job.loss()  # the copies are there, and of other weights
        with torch.no_grad():
            for group in job.owned.runtime.groups:
                for tensor in [*group.masters.values(), *group.copies.values()]:
                    tensor.fill_(math.nan)
        assert job.manager.load()
        job.data.next = 7
        losses.append(float(job.loss()))
        job.close()
    # The same part of the batch, by one process with the stored weights.
    expected = []
    for source in (path, path, seed):
        model = build_model(Layout("adamw", (1, 1)))
        model.load_state_dict(tensors(source, optimizer=False))
        alone = object.__new__(Job)
        alone.model, alone.layout, alone.data = model, Layout("owner", (2, 2)), job.data
        expected.append(float(alone.loss()))
    return list(zip(losses, expected, strict=True))


def test_the_first_forward_uses_what_was_loaded(looked: tuple[Path, list[Any]], seed: Path) -> None:
    """Copies that leaders and resident layers held before are never computed with, on any row,
    whether everything is loaded or the model alone."""
    for losses in run_world(4, load_over_poison, str(looked[0]), str(seed)):
        for loss, expected in losses:
            assert loss == pytest.approx(expected, rel=1e-5)


# -- seeds, and other programs ------------------------------------------------------------------


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seed checkpoint, made under owners."""
    folder = tmp_path_factory.mktemp("seed") / "c"
    job = Job(ONE, folder, seed=3)
    job.manager.save(0, last_step=True)
    job.close()
    return folder / "step-0"


def exchange(folder: str, seed: str) -> list[str]:
    """Load the seed into each line; exchange checkpoints with torchtitan's own manager."""
    open_world()
    root = Path(folder)
    for mode in ("adamw", "gather", "owner", "torch"):
        job = Job(Layout(mode, (1, 2)), root / mode, seed=5, initial_load_path=seed)
        job.manager.initial_load_model_only = True
        assert job.manager.load() and job.step == 0
        job.manager.save(0)
        job.close()
    plain, owner = Layout("adamw", (1, 2)), Layout("owner", (1, 2))
    Job(plain, root / "stock", stock=True).train(2, (2,)).close()
    with Lines() as lines:
        job = Job(owner, root / "from_stock", seed=5, initial_load_path=str(root / "stock/step-2"))
        assert job.manager.load() and job.step == 2
        job.manager.save(2)
        job.train(4, (4,)).close()
    source = str(root / "from_stock" / "step-4")
    for layout, name in ((plain, "to_stock"), (Layout("adamw", (1, 2), fused=True), "to_fused")):
        model_only = {"initial_load_path": source, "initial_load_model_only": True}
        job = Job(layout, root / name, seed=5, stock=True, **model_only)
        assert job.manager.load()
        job.manager.save(4)
        job.close()
    model = build_model(plain, seed=5)
    place(model, plain)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=source)
    dcp.save(state, checkpoint_id=root / "by_dcp")
    ours = Job(plain, root / "ours").train(2, (2,))
    ours.close()
    whole = {"initial_load_path": str(root / "ours/step-2"), "initial_load_model_only": False}
    job = Job(plain, root / "whole", seed=5, stock=True, **whole)
    assert job.manager.load() and job.step == 2
    job.train(4)
    assert job.losses == ours.train(4).losses[2:]
    return lines


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory, seed: Path) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("exchange")
    return folder, run_world(2, exchange, str(folder), str(seed), timeout_seconds=120)[0]


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(v, other[k]) for k, v in one.items())


def test_lines_start_from_one_seed(seed: Path, exchanged: tuple[Path, list[str]]) -> None:
    """A, B, C and torch have the bits of the seed checkpoint, which holds a model alone."""
    expected = tensors(seed)
    assert expected.keys() == stored(seed).keys()
    assert torch.equal(expected["lm_head.weight"], build_model(ONE, 3).lm_head.weight)
    for mode in ("adamw", "gather", "owner", "torch"):
        found = tensors(exchanged[0] / mode / "step-0", optimizer=False)
        assert _equal(found, expected), mode


def test_torchtitans_checkpoint_goes_on_with_owners(exchanged: tuple[Path, list[str]]) -> None:
    """Weights, and the state of what stays with AdamW, have their bits; matrices begin with no
    momentum, the log says how many, and training goes on."""
    folder, lines = exchanged
    there, here = stored(folder / "stock" / "step-2"), tensors(folder / "from_stock" / "step-2")
    matrices = {k for k in here if k.endswith(".momentum_buffer")}
    assert matrices and not any(here[key].any() for key in matrices)
    assert all(torch.equal(here[key], there[key]) for key in here.keys() - matrices)
    assert any("tok_embeddings.weight.exp_avg_sq" in key for key in here)
    (line,) = [line for line in lines if "starts fresh" in line]
    assert f"{len(matrices)} parameters" in line
    after = tensors(folder / "from_stock" / "step-4")
    assert all(after[key].any() for key in matrices)


@pytest.mark.parametrize("name", ["to_stock/step-4", "to_fused/step-4", "by_dcp"])
def test_other_programs_read_the_model(name: str, exchanged: tuple[Path, list[str]]) -> None:
    """torchtitan's manager (with and without fused projections) and DCP alone load the weights of
    a job with owners into plain FSDP2, and have its bits."""
    folder, _ = exchanged
    expected = tensors(folder / "from_stock" / "step-4", optimizer=False)
    assert _equal(tensors(folder / name, optimizer=False), expected)


# -- groups, settings, schedules -----------------------------------------------------------------


def test_groups_with_the_same_settings_stay_apart(tmp_path: Path) -> None:
    """State belongs to names: however parameters are grouped, and in whatever order, each gets its
    own momentum back."""
    from torchtitan.components.optimizer import ParamGroupConfig

    def groups(*patterns: str) -> dict[str, Any]:
        entries = [
            ParamGroupConfig(pattern=p, optimizer_name="DMuon", optimizer_kwargs={"lr": 0.02})
            for p in patterns
        ]
        return {"param_groups": entries}

    first = Job(ONE, tmp_path / "c", groups(r"ffn\.w1", r"ffn\.w3")).train(2, (2,))
    first.close()
    for options in (groups(r"ffn\.w3", r"ffn\.w1", "wo"), {}):
        second = Job(ONE, tmp_path / "c", options, seed=5)
        assert second.manager.load()
        second.manager.checkpoints = type(second.manager.checkpoints)(tmp_path / "again")
        second.manager.save(2)
        second.close()
        there, here = tensors(tmp_path / "c" / "step-2"), tensors(tmp_path / "again" / "step-2")
        assert _equal(there, here)
    w1, w3 = (
        there[f"optimizer.state.layers.0.ffn.{n}.weight.momentum_buffer"] for n in ("w1", "w3")
    )
    assert w1.shape == w3.shape and not torch.equal(w1, w3)


def test_settings_are_the_jobs(tmp_path: Path) -> None:
    """Rates, momentum and decay of the running job hold, for both routes, and the log says what
    changed; the schedule goes on from the saved step with the new rates."""
    Job(ONE, tmp_path / "c").train(2, (2,)).close()
    options = {"lr": 0.04, "adamw_lr": 1e-3, "momentum": 0.9, "weight_decay": 0.0}
    with Lines() as lines:
        job = Job(ONE, tmp_path / "c", options)
        assert job.manager.load()
    for group in job.optimizers.optimizers[0].param_groups:
        base = 0.04 if group["route"] == "matrix" else 1e-3
        # Two of three steps of the warm-up are done.
        assert group["initial_lr"] == base and group["lr"] == pytest.approx(base)
        assert group.get("momentum", 0.9) == 0.9
    (line,) = [line for line in lines if "changed since the checkpoint" in line]
    for text in ("lr 0.02 -> 0.04", "lr 0.003 -> 0.001", "momentum 0.95 -> 0.9", "weight_decay"):
        assert text in line, line
    with Lines() as lines:
        job.close()
        again = Job(ONE, tmp_path / "c")
        assert again.manager.load()
        again.close()
    assert not [line for line in lines if "changed since the checkpoint" in line]


def test_schedules_go_on_for_each_group(tmp_path: Path) -> None:
    """Stopped in the middle of a schedule, the rates of both routes go on along the same curve, at
    their constant ratio, and so do the weights."""

    def curve(job: Job, until: int) -> list[tuple[float, ...]]:
        rates = []
        while job.step < until:
            rates.append(tuple(g["lr"] for g in job.optimizers.optimizers[0].param_groups))
            job.train(job.step + 1)
        return rates

    whole, first = Job(ONE, tmp_path / "w"), Job(ONE, tmp_path / "c", interval=6)
    expected = curve(whole, 10)
    assert curve(first, 6) == expected[:6]
    first.manager.save(6)
    first.close()
    second = Job(ONE, tmp_path / "c", seed=5)
    assert second.manager.load()
    assert curve(second, 10) == expected[6:]
    assert [a / b for a, b in expected] == pytest.approx([0.02 / 3e-3] * 10)
    assert len(set(expected)) > 8
    assert second.losses == whole.losses[6:]
    second.close()
    whole.close()
