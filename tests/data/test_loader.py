"""Loaders with numbered samples: the order, the ranks, the end of an epoch and resuming."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset

from torchtitan_dmuon.data import (
    CorpusDataLoader,
    CorpusTokenizer,
    RandomTokenDataLoader,
    StreamingDataLoader,
    VocabOnlyTokenizer,
    loader_config,
    register_datasets,
)
from torchtitan_dmuon.data.order import permutation

WriteJsonl = Callable[..., Path]
Sample = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
Build = Callable[..., Any]

SEQ_LEN = 5
NUM_WINDOWS = 26


def samples(batch: tuple[dict[str, torch.Tensor], torch.Tensor]) -> list[Sample]:
    """The samples of a batch as plain numbers: inputs, labels, positions."""
    inputs, labels = batch
    columns = (inputs["input"], labels, inputs["positions"])
    assert all(tensor.dtype == torch.int64 for tensor in columns)
    rows = zip(*(tensor.tolist() for tensor in columns), strict=True)
    return [tuple(tuple(values) for values in row) for row in rows]


def take(loader: BaseDataLoader, batches: int) -> list[Sample]:
    found = itertools.islice(iter(loader), batches)
    return [sample for batch in found for sample in samples(batch)]


@pytest.fixture
def build(
    tmp_path: Path,
    number_tokenizer: BaseTokenizer,
    numbers: Callable[..., str],
    write_jsonl: WriteJsonl,
) -> Build:
    """Builds loaders over one corpus of 26 windows of 5 pairs, every window different."""
    path = tmp_path / "corpus.jsonl"
    # 40 + 50 + 43 tokens: 130 pairs and, with 2 more, a partial window that is dropped.
    write_jsonl(path, [numbers(40), numbers(50, 100), numbers(45, 200)])

    def make(
        world: int = 1, rank: int = 0, batch: int = 1, seq_len: int = SEQ_LEN, **fields: Any
    ) -> CorpusDataLoader:
        fields.setdefault("dataset_path", str(path))
        config = CorpusDataLoader.Config(
            dataset="local_files", cache_folder=str(tmp_path / "cache"), **fields
        )
        loader: CorpusDataLoader = config.build(
            dp_world_size=world,
            dp_rank=rank,
            tokenizer=number_tokenizer,
            seq_len=seq_len,
            local_batch_size=batch,
            snapshot_every_n_steps=7,
        )
        return loader

    return make


@pytest.mark.parametrize("shuffle", [True, False])
def test_global_batches_do_not_depend_on_the_ranks(build: Build, shuffle: bool) -> None:
    """1, 2, 3 and 4 ranks, with and without gradient accumulation: every global batch of 12 is the
    same set of samples, no two ranks hold the same one, across the end of an epoch as well."""
    stream = take(build(shuffle=shuffle), 48)
    cuts = [(1, 12, 1), (1, 4, 3), (2, 3, 2), (3, 4, 1), (4, 3, 1), (4, 1, 3)]
    for world, batch, accumulation in cuts:
        loaders = [iter(build(world, rank, batch, shuffle=shuffle)) for rank in range(world)]
        for step in range(4):
            found = [
                sample
                for loader in loaders
                for _ in range(accumulation)
                for sample in samples(next(loader))
            ]
            assert sorted(found) == sorted(stream[12 * step : 12 * (step + 1)])


def test_rank_reads_every_dth_sample(build: Build) -> None:
    """Rank r of D takes samples r, r + D, r + 2 D, ... of the one global sequence, in order."""
    stream = take(build(), 24)
    for rank in range(3):
        assert take(build(3, rank, 2), 4) == stream[rank::3]


def test_an_epoch_is_every_window_once(build: Build) -> None:
    """Each epoch has all windows once, in an order of its own; another seed, another order."""
    in_order = take(build(shuffle=False), NUM_WINDOWS)
    assert len(set(in_order)) == NUM_WINDOWS
    assert in_order[0][0] == (0, 1, 2, 3, 4) and in_order[1][0] == (5, 6, 7, 8, 9)
    stream = take(build(), 2 * NUM_WINDOWS)
    first, second = stream[:NUM_WINDOWS], stream[NUM_WINDOWS:]
    assert sorted(first) == sorted(second) == sorted(in_order)
    orders = [first, second, in_order, take(build(seed=7), NUM_WINDOWS)]
    assert all(a != b for a, b in itertools.combinations(orders, 2))
    assert take(build(), NUM_WINDOWS) == first


def test_order_is_pinned() -> None:
    """The order of a seed is a promise to every checkpoint that was ever written."""
    assert permutation(8, 42, 0).tolist() == [4, 1, 3, 6, 0, 7, 2, 5]
    assert permutation(8, 42, 1).tolist() != permutation(8, 42, 0).tolist()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    world=st.integers(1, 4),
    batch=st.integers(1, 4),
    steps=st.integers(0, 9),
    new_world=st.integers(1, 4),
    new_batch=st.integers(1, 4),
    shuffle=st.booleans(),
)
def test_resume_on_another_number_of_ranks(
    world: int, batch: int, steps: int, new_world: int, new_batch: int, shuffle: bool
) -> None:
    """After any number of batches another number of ranks, with another batch size, continues with
    exactly the next samples: nothing twice, nothing left out."""

    def make(world: int, rank: int, batch: int) -> RandomTokenDataLoader:
        return random_loader(world=world, rank=rank, batch=batch)

    consumed = world * batch * steps
    loaders = [make(world, rank, batch) for rank in range(world)]
    for loader in loaders:
        take(loader, steps)
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    assert states[0]["samples"] == consumed
    count = new_world * new_batch * 2
    expected = take(make(1, 0, 1), consumed + count)[consumed:]
    found = []
    for rank in range(new_world):
        resumed = make(new_world, rank, new_batch)
        resumed.load_state_dict(states[rank % world])
        found.append(take(resumed, 2))
    assert [s for group in zip(*found, strict=True) for s in group] == expected


def test_corpus_resumes_across_an_epoch(build: Build) -> None:
    """A corpus resumes in its second epoch, with another number of ranks, at the next sample."""
    stream = take(build(), 60)
    loader = build(2, 1, 5)
    take(loader, 3)
    state = loader.state_dict()
    assert state["samples"] == 30
    resumed = [build(3, rank, 2) for rank in range(3)]
    for part in resumed:
        part.load_state_dict(state)
    found = [take(part, 5) for part in resumed]
    assert [s for group in zip(*found, strict=True) for s in group] == stream[30:60]


def test_state_counts_what_was_yielded(build: Build) -> None:
    """Between batches the state counts exactly the batches handed out, in plain numbers and text;
    iterating again goes on, and an empty state changes nothing."""
    loader = build(2, 0, 3)
    assert loader.state_dict()["samples"] == 0
    iterator = iter(loader)
    for step in range(1, 4):
        next(iterator)
        assert loader.state_dict()["samples"] == 6 * step
    assert {type(value) for value in loader.state_dict().values()} <= {int, str, bool}
    loader.load_state_dict({})
    assert loader.state_dict()["samples"] == 18
    assert samples(next(iter(loader))) == take(build(2, 0, 3), 4)[-3:]


def test_finite_data_end_together(build: Build) -> None:
    """Without ``infinite`` all ranks stop after the same batch, once, and stay stopped."""
    stream = take(build(), NUM_WINDOWS)
    for world, batch in [(1, 1), (2, 3), (3, 4), (4, 6)]:
        loaders = [build(world, rank, batch, infinite=False) for rank in range(world)]
        parts = [take(loader, 100) for loader in loaders]
        batches = NUM_WINDOWS // (world * batch)
        assert [len(part) for part in parts] == [batches * batch] * world
        assert sorted(itertools.chain(*parts)) == sorted(stream[: batches * batch * world])
        assert all(take(loader, 1) == [] for loader in loaders)


def test_too_small_a_corpus_is_an_error(build: Build) -> None:
    """Fewer windows than a global batch: the message has both counts, in tokens too."""
    with pytest.raises(
        ValueError,
        match=r"135 tokens in 3 documents, which make 26 windows.* needs "
        r"28 windows, that is 143 tokens",
    ):
        build(4, 0, 7)
    with pytest.raises(ValueError, match="dp_rank 2 is not one of 2 ranks"):
        build(2, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 7}, "'seed' is 42 in the checkpoint and 7 in this run"),
        ({"shuffle": False}, "'shuffle' is True in the checkpoint and False"),
        ({"seq_len": 4}, "'seq_len' is 5 in the checkpoint and 4"),
        ({"dataset_path": "other"}, "'corpus' is '.*' in the checkpoint and '.*'"),
    ],
)
def test_state_of_other_data_is_refused(
    change: dict[str, Any],
    message: str,
    build: Build,
    tmp_path: Path,
    numbers: Callable[..., str],
    write_jsonl: WriteJsonl,
) -> None:
    """A state of another corpus, seed, order or window length names the key, both values and the
    remedy, and leaves the loader as it was."""
    state = build().state_dict()
    if "dataset_path" in change:
        other = write_jsonl(tmp_path / "other.jsonl", [numbers(135)])
        change = {"dataset_path": str(other)}
    loader = build(**change)
    take(loader, 1)
    with pytest.raises(ValueError, match=message) as error:
        loader.load_state_dict(state)
    assert 'checkpoint.exclude_from_loading = ["dataloader"]' in str(error.value)
    assert loader.state_dict()["samples"] == 1
    with pytest.raises(ValueError, match=r"has no 'samples' \(it has \['dp_rank_0'"):
        loader.load_state_dict({"dp_rank_0": b"", "world_size": 1})


def test_state_passes_through_a_checkpoint(build: Build, tmp_path: Path) -> None:
    """torch.distributed.checkpoint saves and restores the loader as torchtitan calls it."""
    loader = build(1, 0, 2)
    take(loader, 3)
    dcp.save({"dataloader": loader}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    resumed = build(2, 1, 1)
    dcp.load({"dataloader": resumed}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    assert resumed.state_dict() == loader.state_dict()
    assert take(resumed, 1) == take(build(), 8)[-1:]


def test_same_stream_as_torchtitan(
    tokenizer: CorpusTokenizer, prose_file: Path, tmp_path: Path
) -> None:
    """Unshuffled on one rank, inputs, labels and positions are those of torchtitan's own loader."""
    register_datasets()
    for seq_len in (3, 8, 50):
        expected = HuggingFaceTextDataset("local_files", str(prose_file), tokenizer, seq_len)
        config = loader_config(
            "local_files",
            str(prose_file),
            shuffle=False,
            infinite=False,
            cache_folder=str(tmp_path),
        )
        loader = config.build(
            dp_world_size=1, dp_rank=0, tokenizer=tokenizer, seq_len=seq_len, local_batch_size=1
        )
        ours = take(loader, 10_000)
        assert ours == [
            sample
            for inputs, labels in expected
            for sample in samples(({k: v[None] for k, v in inputs.items()}, labels[None]))
        ]


def random_loader(
    world: int = 1, rank: int = 0, batch: int = 1, vocab_size: int = 50, **fields: Any
) -> RandomTokenDataLoader:
    tokenizer = VocabOnlyTokenizer.Config(vocab_size=vocab_size).build(tokenizer_path="not read")
    loader: RandomTokenDataLoader = RandomTokenDataLoader.Config(**fields).build(
        dp_world_size=world,
        dp_rank=rank,
        tokenizer=tokenizer,
        seq_len=SEQ_LEN,
        local_batch_size=batch,
    )
    return loader


def test_random_tokens() -> None:
    """A random sample is one document of ids below the vocabulary size, a function of the seed and
    its number; all ids occur, evenly; every number of ranks reads the same ones."""
    stream = take(random_loader(), 1000)
    for inputs, labels, positions in stream:
        assert inputs[1:] == labels[:-1] and positions == tuple(range(SEQ_LEN))
    ids = torch.tensor([inputs for inputs, _, _ in stream]).flatten()
    counts = torch.bincount(ids, minlength=50)
    assert len(counts) == 50 and counts.min() > 60 and counts.max() < 140
    assert take(random_loader(2, 1, 3), 4) == stream[1:24:2]
    assert take(random_loader(seed=7), 5) != stream[:5]
    assert stream[0][0] == (10, 35, 32, 47, 1)


def test_random_tokens_end_and_state() -> None:
    """Random tokens end after ``epoch_samples`` and refuse a state of another vocabulary size."""
    assert len(take(random_loader(2, 1, 3, infinite=False, epoch_samples=20), 100)) == 9
    with pytest.raises(ValueError, match="epoch_samples: 5 is fewer than the 6 samples"):
        random_loader(2, 1, 3, infinite=False, epoch_samples=5)
    with pytest.raises(ValueError, match="'vocab_size' is 50 in the checkpoint and 60"):
        random_loader(vocab_size=60).load_state_dict(random_loader().state_dict())


def test_loader_config_picks_by_kind() -> None:
    """The data set's kind decides the loader; values that do not fit it are refused."""
    expected = {
        "python_stdlib": CorpusDataLoader.Config,
        "local_files": CorpusDataLoader.Config,
        "random_tokens": RandomTokenDataLoader.Config,
        "fineweb_edu": StreamingDataLoader.Config,
        "c4": StreamingDataLoader.Config,
    }
    for name, config_class in expected.items():
        assert type(loader_config(name)) is config_class
    with pytest.raises(ValueError, match="did you mean 'python_stdlib'"):
        loader_config("python_stdlb")
    with pytest.raises(ValueError, match="'random_tokens' reads no files; remove /x"):
        loader_config("random_tokens", "/x")
    with pytest.raises(ValueError, match="seed: expected a number of at least 0, not -1"):
        loader_config("python_stdlib", seed=-1)


@pytest.mark.parametrize("dataset", ["local_files", "random_tokens", "fineweb_edu"])
@pytest.mark.parametrize("steps", [2, -1])
def test_loaders_serve_the_validator(
    dataset: str,
    steps: int,
    tokenizer: CorpusTokenizer,
    prose: list[str],
    tmp_path: Path,
) -> None:
    """torchtitan's validator rebuilds every loader with its own ``infinite`` and no snapshot."""
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": prose}), path)
    config = loader_config(
        dataset,
        None if dataset == "random_tokens" else str(path),
        cache_folder=str(tmp_path / "cache"),
    )
    if isinstance(config, RandomTokenDataLoader.Config):
        config = dataclasses.replace(config, epoch_samples=9)
    validator = Validator.Config(enable=True, steps=steps, dataloader=config).build(
        parallelism=None,
        dp_world_size=2,
        dp_rank=1,
        tokenizer=tokenizer,
        parallel_dims=None,
        loss_fn=None,
        validation_context=None,
        metrics_processor=None,
        seq_len=8,
        local_batch_size=2,
    )
    loader = validator.dl_config.build(
        dp_world_size=2, dp_rank=1, tokenizer=tokenizer, seq_len=8, local_batch_size=2
    )
    found = take(loader, 30)
    assert len(found) == 60 if steps == 2 else 0 < len(found) < 60
