"""Streamed sets: ranks, order, end of an epoch, and a state that is JSON and resumes exactly."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as dcp
from datasets import load_dataset
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

from torchtitan_dmuon.data import StreamingDataLoader

WriteJsonl = Callable[..., Path]
Build = Callable[..., StreamingDataLoader]

NUM_DOCUMENTS = 60
BLOCK = 8


@pytest.fixture
def sets(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    numbers: Callable[..., str],
    write_jsonl: WriteJsonl,
) -> dict[str, str]:
    """The same 60 documents, 3 to 11 tokens each and all different, as sets of several kinds."""
    texts = [numbers(3 + n % 9, 100 * n) for n in range(NUM_DOCUMENTS)]
    jsonl = write_jsonl(tmp_path / "all.jsonl", texts)
    mirror = tmp_path / "mirror" / "sample" / "10BT"
    mirror.mkdir(parents=True)
    for part in range(4):
        rows = texts[15 * part : 15 * (part + 1)]
        pq.write_table(pa.table({"text": rows}), mirror / f"{part}.parquet", row_group_size=4)
    for name, streaming in (("jsonl_stream", True), ("jsonl_whole", False)):
        entry = DatasetConfig(
            path=str(jsonl),
            loader=lambda path, streaming=streaming: load_dataset(
                "json",
                data_files=path,
                split="train",
                streaming=streaming,
                cache_dir=str(tmp_path / "hf"),
            ),
            sample_processor=lambda sample: sample["text"],
        )
        monkeypatch.setitem(DATASETS, name, entry)
    return {"jsonl_stream": "", "jsonl_whole": "", "fineweb_edu": str(tmp_path / "mirror")}


@pytest.fixture
def build(sets: dict[str, str], number_tokenizer: BaseTokenizer) -> Build:
    def make(dataset: str, world: int = 1, rank: int = 0, **fields: Any) -> StreamingDataLoader:
        fields.setdefault("dataset_path", sets[dataset] or None)
        fields.setdefault("shuffle_block", BLOCK)
        config = StreamingDataLoader.Config(dataset=dataset, **fields)
        loader: StreamingDataLoader = config.build(
            dp_world_size=world,
            dp_rank=rank,
            tokenizer=number_tokenizer,
            seq_len=5,
            local_batch_size=2,
        )
        return loader

    return make


def take(loader: StreamingDataLoader, batches: int) -> list[Any]:
    found = itertools.islice(iter(loader), batches)
    return [
        (inputs["input"].tolist(), inputs["positions"].tolist(), labels.tolist())
        for inputs, labels in found
    ]


def documents(batches: list[Any]) -> set[int]:
    """The numbers of the documents whose tokens are in the batches."""
    return {token // 100 for inputs, _, _ in batches for row in inputs for token in row}


def through_json(loader: StreamingDataLoader) -> dict[str, Any]:
    """The loader's state, written as text and read back."""
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return state


ALL_SETS = ["jsonl_stream", "jsonl_whole", "fineweb_edu"]


@pytest.mark.parametrize("dataset", ALL_SETS)
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_resumes_exactly(dataset: str, shuffle: bool, world: int, build: Build) -> None:
    """From a state after any number of batches, in any epoch, the same batches follow, whether or
    not documents are shuffled and whether ranks share files or documents."""
    rank = world - 1
    expected = take(build(dataset, world, rank, shuffle=shuffle), 90 // world)
    for batches in (0, 1, 7, 90 // world - 9):
        loader = build(dataset, world, rank, shuffle=shuffle)
        assert take(loader, batches) == expected[:batches]
        state = through_json(loader)
        assert state == loader.state_dict()
        resumed = build(dataset, world, rank, shuffle=shuffle)
        resumed.load_state_dict(state)
        assert take(resumed, 9) == expected[batches : batches + 9]


@pytest.mark.parametrize("dataset", ALL_SETS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_the_documents(dataset: str, world: int, build: Build) -> None:
    """In one epoch every document is read, by one rank only (but for what fills no window)."""
    parts = [
        documents(take(build(dataset, world, rank, infinite=False), 1000)) for rank in range(world)
    ]
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(parts, 2))
    assert len(set.union(*parts)) >= NUM_DOCUMENTS - 4 * world


def test_order_comes_from_the_seed(build: Build) -> None:
    """A block holds the documents of its place in the file, in an order of the seed, epoch and
    block; without shuffling the order is the file's."""

    def order(**fields: Any) -> list[int]:
        batches = take(build("jsonl_stream", **fields), 60)
        tokens = [token for inputs, _, _ in batches for row in inputs for token in row]
        return [token // 100 for token in tokens if token % 100 == 0]

    plain = order(shuffle=False)
    assert plain[:NUM_DOCUMENTS] == list(range(NUM_DOCUMENTS))
    shuffled = order()
    for start in range(0, 40, BLOCK):
        assert sorted(shuffled[start : start + BLOCK]) == list(range(start, start + BLOCK))
    steps = [[n - start for n in shuffled[start : start + BLOCK]] for start in range(0, 40, BLOCK)]
    assert all(a != b for a, b in itertools.combinations(steps, 2))
    assert shuffled[:NUM_DOCUMENTS] != shuffled[NUM_DOCUMENTS : 2 * NUM_DOCUMENTS]
    assert order() == shuffled
    assert order(seed=7) != shuffled


def test_state_is_text_and_numbers(build: Build) -> None:
    """The state of a rank is JSON text: nothing that has to be unpickled."""
    loader = build("fineweb_edu", 2, 1)
    take(loader, 5)
    state = loader.state_dict()
    assert {type(value) for value in state.values()} == {int, str}
    assert isinstance(json.loads(str(state["dp_rank_1"])), dict)


def test_state_of_other_data_is_refused(build: Build) -> None:
    """Another number of ranks, set, seed, block or form of state is an error with the remedy."""
    state = build("fineweb_edu", 2, 1).state_dict()
    cases: list[tuple[StreamingDataLoader, str]] = [
        (build("fineweb_edu", 3, 1), "'world_size' is 2 in the checkpoint and 3 in this run"),
        (build("jsonl_stream", 2, 1), "'dataset' is 'fineweb_edu' in the checkpoint"),
        (build("fineweb_edu", 2, 1, seed=7), "'seed' is 42 in the checkpoint and 7"),
        (build("fineweb_edu", 2, 1, shuffle=False), "'shuffle_block' is 8 in the .* and 0"),
        (build("fineweb_edu", 2, 0), r"has no 'dp_rank_0' \(it has"),
    ]
    for loader, message in cases:
        with pytest.raises(ValueError, match=message) as error:
            loader.load_state_dict(state)
        assert 'exclude_from_loading = ["dataloader"]' in str(error.value)
    with pytest.raises(ValueError, match="'dp_rank_1' of the checkpoint is not JSON text"):
        build("fineweb_edu", 2, 1).load_state_dict({**state, "dp_rank_1": b"\x80\x04"})


def test_state_passes_through_a_checkpoint(build: Build, tmp_path: Path) -> None:
    """torch.distributed.checkpoint saves and restores the state of each rank by its own key."""
    loader = build("fineweb_edu")
    take(loader, 5)
    dcp.save({"dataloader": loader}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    resumed = build("fineweb_edu")
    dcp.load({"dataloader": resumed}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    assert take(resumed, 5) == take(build("fineweb_edu"), 10)[5:]


def test_wrong_key_and_path(build: Build, tmp_path: Path, write_jsonl: WriteJsonl) -> None:
    """A missing text key names the keys there are; a missing mirror names the path; values that
    would break resuming are refused."""
    with pytest.raises(ValueError, match=r"have no 'body', found the keys \['text'\]"):
        take(build("fineweb_edu", text_key="body"), 1)
    with pytest.raises(ValueError, match=r"dataset_path: /no/such/mirror does not exist"):
        build("fineweb_edu", dataset_path="/no/such/mirror")
    write_jsonl(tmp_path / "only.jsonl", ["a"])
    with pytest.raises(ValueError, match=r"holds no \.parquet file"):
        build("fineweb_edu", dataset_path=str(tmp_path / "only.jsonl"))
    with pytest.raises(ValueError, match="shuffle_block: expected at least 1"):
        build("fineweb_edu", shuffle_block=0)
    with pytest.raises(ValueError, match="num_workers: expected 0, not 2"):
        build("fineweb_edu", num_workers=2)


def test_rank_without_documents_stops(build: Build) -> None:
    """More ranks than documents: the rank that has none says so instead of searching forever."""
    with pytest.raises(ValueError, match="has no document for this data-parallel rank"):
        take(build("jsonl_stream", NUM_DOCUMENTS + 1, NUM_DOCUMENTS), 1)


def test_resumes_at_the_end_of_an_epoch(build: Build) -> None:
    """A state taken after the last document of an epoch continues with the next epoch."""
    loader = build("jsonl_stream", infinite=False)
    take(loader, 1000)
    resumed = build("jsonl_stream")
    resumed.load_state_dict(through_json(loader))
    assert documents(take(resumed, 1))


def test_unreachable_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch, build: Build) -> None:
    """Without the Hub the error names the repository and two ways out."""

    def refuse(*arguments: Any, **fields: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr("torchtitan_dmuon.data.datasets.hf_datasets.load_dataset", refuse)
    message = r"HuggingFaceFW/fineweb-edu .*\(no route\).*dataset_path.*dataset = 'python_stdlib'"
    with pytest.raises(ConnectionError, match=message):
        build("fineweb_edu", dataset_path=None)


def test_batches_are_int64(build: Build) -> None:
    """Batches have torchtitan's form: int64 [B, L] inputs, positions and labels."""
    inputs, labels = next(iter(build("fineweb_edu")))
    for tensor in (inputs["input"], inputs["positions"], labels):
        assert (tensor.dtype, tensor.shape) == (torch.int64, (2, 5))
