"""Damaged, foreign and malicious checkpoints: one line each, and nothing of them is run."""

from __future__ import annotations

import io
import json
import pickle
import re
import shutil
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from tests.checkpoint.jobs import Job, Layout, open_world
from tests.worlds import run_world
from torchtitan_dmuon.checkpoint.archive import MANIFEST, Archive
from torchtitan_dmuon.checkpoint.errors import CheckpointError
from torchtitan_dmuon.checkpoint.folder import INDEX

ONE = Layout("owner", (1, 1))
DATA = "__0_0.distcp"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of step 2."""
    folder = tmp_path_factory.mktemp("faults") / "c"
    job = Job(ONE, folder)
    job.train(2, (2,))
    job.close()
    return folder / "step-2"


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return shutil.copytree(original, tmp_path / "c" / "step-2")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job that loads."""
    return Job(ONE, tmp_path_factory.mktemp("job") / "c", seed=5)


def _refused(job: Job, path: Path) -> str:
    """Load a checkpoint; return the one line with which it is refused."""
    job.manager.initial_load_path = str(path)
    before = {p.name: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError) as caught:
        job.manager.load()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 700, text
    assert str(path) in text
    assert {p.name: p.read_bytes() for p in path.rglob("*") if p.is_file()} == before
    return text


def _flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 0x10
    file.write_bytes(bytes(data))


def _item(path: Path, name: str) -> tuple[Path, int, int]:
    """Return file, first byte and length of a stored item."""
    for index, info in Archive.open(path).index.storage_data.items():
        if index.fqn == name:
            return path / info.relative_path, info.offset, info.length
    raise KeyError(name)


# -- damage -----------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [1, 1000, None], ids=["a byte", "a block", "all"])
def test_a_truncated_file_is_named(missing: int | None, job: Job, path: Path) -> None:
    """However little is missing at its end."""
    data = (path / DATA).read_bytes()
    (path / DATA).write_bytes(data[:-missing] if missing else b"")
    assert re.search(rf"{DATA}: truncated: \d+ bytes of {len(data)}", _refused(job, path))


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.attention.wo.weight",
        "optimizer.state.layers.1.ffn.up.momentum_buffer",
        "optimizer.state.tok_embeddings.weight.exp_avg",
        "lr_scheduler.last_epoch",
    ],
)
def test_a_flipped_bit_is_found(name: str, job: Job, path: Path) -> None:
    """In the content of weights, state, and what is no tensor; the error names file and item."""
    file, start, length = _item(path, name)
    # The last numbers of the tensor lie before the end of its archive.
    _flip(file, start + length // 2)
    assert f"{DATA}: damaged in {name}: its checksum" in _refused(job, path)


def test_no_byte_of_the_data_is_unchecked(job: Job, path: Path) -> None:
    """A flip anywhere in the data file is found: every byte belongs to an item with a checksum."""
    spans = sorted(
        (info.offset, info.offset + info.length)
        for info in Archive.open(path).index.storage_data.values()
        if info.relative_path == DATA
    )
    assert spans[0][0] == 0 and spans[-1][1] == (path / DATA).stat().st_size
    assert all(one[1] == other[0] for one, other in pairwise(spans))
    assert {(DATA, start) for start, _ in spans} == Archive.open(path).checksums.keys()
    size = (path / DATA).stat().st_size
    for part in range(5):
        _flip(path / DATA, part * size // 5)
        assert "damaged" in _refused(job, path)
        _flip(path / DATA, part * size // 5)


def test_a_flipped_bit_in_the_index_is_found(job: Job, path: Path) -> None:
    """Anywhere in it, by its checksum, before it is read."""
    size = (path / INDEX).stat().st_size
    for position in (0, size // 3, size // 2, size - 1):
        _flip(path / INDEX, position)
        assert f"{INDEX}: damaged" in _refused(job, path)
        _flip(path / INDEX, position)


def test_an_index_that_ends_early_is_found(job: Job, path: Path) -> None:
    """With a manifest beside it and without."""
    data = (path / INDEX).read_bytes()
    (path / INDEX).write_bytes(data[:-100])
    assert f"{INDEX}: damaged" in _refused(job, path)
    (path / MANIFEST).unlink()
    for content in (data[:-100], data[:10], b"", b"not a pickle", pickle.dumps({"a": 1})):
        (path / INDEX).write_bytes(content)
        assert f"{INDEX}: not the index of a checkpoint" in _refused(job, path)


def test_a_damaged_manifest_is_found(job: Job, path: Path) -> None:
    """Any flipped bit, any end, and content that is no manifest at all."""
    file = path / MANIFEST
    good = file.read_bytes()
    for position in range(0, len(good), len(good) // 12):
        _flip(file, position)
        assert f"{MANIFEST}: damaged" in _refused(job, path), position
        file.write_bytes(good)
    for content in (good[:-2], good[: len(good) // 2], b"", b"{}", b"[]", b"7", b"\xff\xfe"):
        file.write_bytes(content)
        assert f"{MANIFEST}: damaged" in _refused(job, path), content


def test_a_newer_format_is_said(job: Job, path: Path) -> None:
    """A later release's checkpoint is not guessed at."""
    content = json.loads((path / MANIFEST).read_text())["content"] | {"format": 99}
    crc = zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    (path / MANIFEST).write_text(json.dumps({"crc32": crc, "content": content}))
    assert "written by a newer release (format 99)" in _refused(job, path)


def test_a_missing_file_is_named(job: Job, path: Path) -> None:
    """A shard that was not copied along."""
    (path / DATA).unlink()
    assert f"{DATA}: missing; step-2 is not whole" in _refused(job, path)


def test_a_folder_that_is_no_checkpoint_is_said(job: Job, path: Path, tmp_path: Path) -> None:
    """Its index is missing, or there is nothing at all."""
    (path / INDEX).unlink()
    assert "not a complete checkpoint (it has no .metadata)" in _refused(job, path)
    (tmp_path / "empty").mkdir()
    assert "not a complete checkpoint" in _refused(job, tmp_path / "empty")
    assert "not a complete checkpoint" in _refused(job, tmp_path / "nowhere")


def load_damaged(path: str) -> str:
    """Load what is damaged where one rank alone reads it."""
    open_world()
    job = Job(Layout("owner", (1, 2)), Path(path).parent / "other", initial_load_path=path)
    try:
        job.manager.load()
    except CheckpointError as e:
        return str(e)
    return ""


def test_all_ranks_say_what_one_has_found(path: Path) -> None:
    """No rank goes on, waits or says something else."""
    file, start, length = _item(path, "layers.0.attention.wo.weight")
    _flip(file, start + length // 2)
    one, other = run_world(2, load_damaged, str(path))
    assert one == other and "damaged in layers.0.attention.wo.weight" in one


# -- another model ------------------------------------------------------------------------------


def _rewrite(path: Path, change: Callable[[Any], None]) -> None:
    """Change the index, as somebody would who knows no checksums."""
    index = pickle.loads((path / INDEX).read_bytes())
    change(index)
    (path / INDEX).write_bytes(pickle.dumps(index))
    (path / MANIFEST).unlink(missing_ok=True)


def _without(name: str) -> Callable[[Any], None]:
    def change(index: Any) -> None:
        del index.state_dict_metadata[name]
        for key in [key for key in index.storage_data if key.fqn == name]:
            del index.storage_data[key]

    return change


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.ffn.w1.weight",
        "norm.weight",
        "optimizer.state.layers.0.ffn.w1.weight.momentum_buffer",
        "optimizer.state.layers.1.attention.qkv.wk.bias.exp_avg",
        "optimizer.state.lm_head.weight.step",
        "lr_scheduler.last_epoch",
        "train_state.step",
        "dataloader.next",
    ],
)
def test_one_missing_entry_is_named(name: str, job: Job, path: Path) -> None:
    """A weight, a momentum, a moment or a counter that the checkpoint lacks is an error and never
    a silent reset."""
    _rewrite(path, _without(name))
    assert f"it lacks {name}" in _refused(job, path)


def test_one_more_weight_is_named(job: Job, path: Path) -> None:
    """What the model has not."""

    def change(index: Any) -> None:
        weights = index.state_dict_metadata
        weights["layers.2.ffn.w1.weight"] = weights["layers.0.ffn.w1.weight"]

    _rewrite(path, change)
    assert "it has layers.2.ffn.w1.weight, which this job has not" in _refused(job, path)


def test_another_shape_is_named(job: Job, path: Path) -> None:
    """With both shapes, of weights and of state."""
    name = "optimizer.state.layers.0.ffn.w1.weight.momentum_buffer"

    def change(index: Any) -> None:
        for key in ("lm_head.weight", name):
            index.state_dict_metadata[key].size = torch.Size((64, 32))

    _rewrite(path, change)
    text = _refused(job, path)
    assert "lm_head.weight is (64, 32) there and (31, 32) here" in text
    assert f"{name} is (64, 32) there and (40, 32) here" in text


def test_another_model_is_one_line(path: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Many differences are counted, not listed."""
    monkeypatch.setattr("tests.checkpoint.jobs.HIDDEN", 48)
    other = Job(ONE, tmp_path / "other")
    text = _refused(other, path)
    assert re.search(r"is \(40, 32\) there and \(48, 32\) here; .* and \d+ more", text)
    other.close()


# -- malice -------------------------------------------------------------------------------------


class Payload:
    """Leaves a file if it is ever unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


class State(Payload):
    """The same through the state of an object that an index may hold."""

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.Size, ((3,),), {"a": Payload(self.mark)}


class Shell(Payload):
    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, (f"touch {self.mark}",)


PAYLOADS = [Payload, State, Shell]


def test_the_payloads_would_run(tmp_path: Path) -> None:
    """What the next tests refuse is live."""
    for kind in (Payload, Shell):
        mark = tmp_path / kind.__name__
        pickle.loads(pickle.dumps(kind(mark)))
        assert mark.exists()


@pytest.mark.parametrize("kind", PAYLOADS)
@pytest.mark.parametrize("place", ["whole", "state_dict_metadata", "planner_data", "storage_data"])
def test_an_index_runs_nothing(
    kind: type[Payload], place: str, job: Job, path: Path, tmp_path: Path
) -> None:
    """Wherever in .metadata the payload is, in a checkpoint without a manifest and in one whose
    manifest was made to agree."""
    mark = tmp_path / "mark"
    index: Any = pickle.loads((path / INDEX).read_bytes())
    if place == "whole":
        index = kind(mark)
    elif place == "planner_data":
        index.planner_data = kind(mark)
    else:
        getattr(index, place)["norm.weight"] = kind(mark)
    (path / INDEX).write_bytes(pickle.dumps(index))
    content = json.loads((path / MANIFEST).read_text())["content"]
    content["index_crc32"] = zlib.crc32((path / INDEX).read_bytes())
    crc = zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    (path / MANIFEST).write_text(json.dumps({"crc32": crc, "content": content}))
    assert "not the index of a checkpoint" in _refused(job, path)
    (path / MANIFEST).unlink()
    assert "which no index holds" in _refused(job, path)
    assert not mark.exists()


@pytest.mark.parametrize("kind", PAYLOADS)
@pytest.mark.parametrize("name", ["layers.0.attention.wo.weight", "lr_scheduler.last_epoch"])
def test_an_item_runs_nothing(
    kind: type[Payload], name: str, job: Job, path: Path, tmp_path: Path
) -> None:
    """In place of a tensor, and of what is no tensor."""
    mark = tmp_path / "mark"
    data = io.BytesIO()
    torch.save(kind(mark), data)

    def change(index: Any) -> None:
        for key, info in index.storage_data.items():
            if key.fqn == name:
                info.offset, info.length = (path / DATA).stat().st_size, len(data.getvalue())

    _rewrite(path, change)
    with (path / DATA).open("ab") as file:
        file.write(data.getvalue())
    text = _refused(job, path)
    assert name in text and "code is never loaded" in text
    assert not mark.exists()


def test_an_index_cannot_point_out_of_its_folder(job: Job, path: Path) -> None:
    """Neither up nor to an absolute path."""
    for target in ("../secret", "/etc/hostname", "a/../../b"):

        def change(index: Any, target: str = target) -> None:
            for info in index.storage_data.values():
                info.relative_path = target

        _rewrite(path, change)
        assert f"it points out of its folder, at {target}" in _refused(job, path)


def test_stock_checkpoints_run_nothing(job: Job, tmp_path: Path) -> None:
    """A payload that DCP itself has stored beside a model."""
    mark = tmp_path / "mark"
    state = {**nn.Module.state_dict(job.model), "lr_scheduler": {"last_epoch": Payload(mark)}}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "stock"), no_dist=True)
    job.manager.exclude_from_loading = ["optimizer", "dataloader", "train_state"]
    try:
        assert "code is never loaded" in _refused(job, tmp_path / "stock")
    finally:
        job.manager.exclude_from_loading = []
    assert not mark.exists()
