"""The tokenised corpus: window arithmetic, ids, and a cache that is complete or rebuilt."""

import json
import logging
import multiprocessing
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchtitan.components.tokenizer import BaseTokenizer

from torchtitan_dmuon.data import Corpus, CorpusTokenizer, TextSource, open_corpus, open_source
from torchtitan_dmuon.data import corpus as corpus_module
from torchtitan_dmuon.data.cache import cached_folder, file_digest
from torchtitan_dmuon.data.corpus import CorpusInfo, batch_encoder

WriteJsonl = Callable[..., Path]
Pair = tuple[int, int, int]


def reference_pairs(documents: list[list[int]]) -> list[Pair]:
    """(input, label, position in the document) of every pair, written the obvious way."""
    return [
        (ids[place], ids[place + 1], place) for ids in documents for place in range(len(ids) - 1)
    ]


def reference_window(pairs: list[Pair], start: int, length: int) -> list[Pair]:
    """A window whose positions restart where a document or the window begins."""
    window = []
    for place, (token, label, position) in enumerate(pairs[start : start + length]):
        restarted = position == 0 or place == 0
        window.append((token, label, 0 if restarted else window[-1][2] + 1))
    return window


def corpus_of(documents: list[list[int]]) -> Corpus:
    """A corpus in memory, laid out as the module's docstring says."""
    kept = [ids for ids in documents if len(ids) > 1]
    info = CorpusInfo(
        dataset="memory",
        num_tokens=sum(map(len, kept)),
        num_documents=len(kept),
        digest="",
        tokenizer_digest="",
    )
    return Corpus(
        info=info,
        tokens=np.array([token for ids in kept for token in ids], dtype=np.uint32),
        pair_starts=np.cumsum([0] + [len(ids) - 1 for ids in kept]),
    )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    documents=st.lists(st.lists(st.integers(0, 999), max_size=9), max_size=12),
    length=st.integers(1, 20),
)
def test_windows_equal_a_slow_reference(documents: list[list[int]], length: int) -> None:
    """Inputs, labels and positions of every window follow the documents: the label of the last
    input of a document is its own last token, and positions restart as torchtitan's do."""
    corpus = corpus_of(documents)
    pairs = reference_pairs(documents)
    assert corpus.info.num_pairs == len(pairs)
    for start in range(len(pairs) - length + 1):
        arrays = corpus.window(start, length)
        assert all(array.dtype == np.int64 and array.shape == (length,) for array in arrays)
        inputs, labels, positions = (array.tolist() for array in arrays)
        found = list(zip(inputs, labels, positions, strict=True))
        assert found == reference_window(pairs, start, length)
    with pytest.raises(IndexError):
        corpus.window(max(0, len(pairs) - length + 1), length)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    documents=st.lists(st.lists(st.integers(0, 99_999), max_size=9), min_size=1, max_size=12),
    batch=st.integers(1, 5),
)
def test_files_hold_the_documents(
    documents: list[list[int]],
    batch: int,
    tmp_path_factory: pytest.TempPathFactory,
    number_tokenizer: BaseTokenizer,
    write_jsonl: WriteJsonl,
) -> None:
    """What is written in batches of any size and mapped back are the documents, in order."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [" ".join(map(str, ids)) for ids in documents]
    source = open_source("local_files", str(write_jsonl(folder / "x.jsonl", texts)))
    kept = [ids for ids in documents if len(ids) > 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "_BATCH_DOCUMENTS", batch)
        if not kept:
            with pytest.raises(ValueError, match="'local_files' is an empty corpus"):
                open_corpus(source, number_tokenizer, str(folder))
            return
        corpus = open_corpus(source, number_tokenizer, str(folder))
    expected = corpus_of(kept)
    assert corpus.tokens.dtype == np.uint32
    assert corpus.tokens.tolist() == [token for ids in kept for token in ids]
    assert corpus.pair_starts.tolist() == expected.pair_starts.tolist()
    assert corpus.info.num_documents == len(kept)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(texts=st.lists(st.text(max_size=60), min_size=1, max_size=8))
def test_batched_ids_equal_single_ids(texts: list[str], tokenizer: CorpusTokenizer) -> None:
    """Batches give the ids that torchtitan's loader would get from ``encode``."""
    singly = [tokenizer.encode(text, add_bos=True, add_eos=True) for text in texts]
    assert batch_encoder(tokenizer)(texts) == singly


def test_padding_tokenizer_is_not_batched(tokenizer: CorpusTokenizer, prose: list[str]) -> None:
    """A tokenizer file that asks for padding would pad a batch to its longest text."""
    singly = [tokenizer.encode(text, add_bos=True, add_eos=True) for text in prose]
    tokenizer.tokenizer.enable_padding(pad_id=0, pad_token="<|endoftext|>")
    try:
        assert batch_encoder(tokenizer)(prose) == singly
    finally:
        tokenizer.tokenizer.no_padding()


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path, write_jsonl: WriteJsonl) -> None:
    """A tokenizer that returns ids beyond its size is an error, not a wrapped uint16."""
    source = open_source("local_files", str(write_jsonl(tmp_path / "x.jsonl", ["1 70000"])))

    class Small(BaseTokenizer):
        def encode(self, *args: Any, **kwargs: Any) -> list[int]:
            return [int(word) for word in args[0].split() if word.isdigit()]

        def decode(self, *args: Any, **kwargs: Any) -> str:
            raise NotImplementedError

        def get_vocab_size(self) -> int:
            return 100

    with pytest.raises(ValueError, match="ids from 1 to 70000, outside its vocabulary"):
        open_corpus(source, Small(), str(tmp_path / "cache"))
    assert not list((tmp_path / "cache").rglob("*.npy"))


def test_key_follows_files_and_tokenizer(
    tmp_path: Path, number_tokenizer: BaseTokenizer, write_jsonl: WriteJsonl
) -> None:
    """Same files and tokenizer: the cache is reused. A changed file or tokenizer: a new entry.
    The digest that checkpoints hold depends on the content only."""

    def opened(texts: list[str], tokenizer: BaseTokenizer, name: str = "x.jsonl") -> Corpus:
        source = open_source("local_files", str(write_jsonl(tmp_path / name, texts)))
        return open_corpus(source, tokenizer, str(tmp_path / "cache"))

    def entries() -> int:
        return len(list((tmp_path / "cache" / "corpora").glob("*/corpus.json")))

    first = opened(["1 2 3"], number_tokenizer)
    source = open_source("local_files", str(tmp_path / "x.jsonl"))
    again = open_corpus(source, number_tokenizer, str(tmp_path / "cache"))
    assert (again.info, entries()) == (first.info, 1)
    assert opened(["1 2 3 4"], number_tokenizer).info.digest != first.info.digest
    assert opened(["1 2 3"], number_tokenizer, "y.jsonl").info.digest == first.info.digest
    assert entries() == 3
    other = type(number_tokenizer)(1000)  # type: ignore[call-arg]
    assert opened(["1 2 3"], other, "y.jsonl").info.tokenizer_digest != first.info.tokenizer_digest


def test_cache_is_private_and_free_of_pickle(
    tmp_path: Path, number_tokenizer: BaseTokenizer, write_jsonl: WriteJsonl
) -> None:
    """Folders are for their owner only; every file is plain NumPy or JSON."""
    source = open_source("local_files", str(write_jsonl(tmp_path / "x.jsonl", ["1 2 3"])))
    open_corpus(source, number_tokenizer, str(tmp_path / "new" / "cache"))
    for path in (tmp_path / "new").rglob("*"):
        if path.is_dir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        elif path.suffix == ".npy":
            np.load(path, allow_pickle=False)
        elif path.suffix == ".json":
            json.loads(path.read_text())
        else:
            assert (path.suffix, path.stat().st_size) == (".lock", 0)


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing", "record", "unrecorded"])
def test_damaged_cache_is_rebuilt_with_one_warning(
    damage: str,
    tmp_path: Path,
    number_tokenizer: BaseTokenizer,
    write_jsonl: WriteJsonl,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A cache entry that is not what was written is found, reported once and built again."""
    source = open_source("local_files", str(write_jsonl(tmp_path / "x.jsonl", ["1 2 3 4 5"])))
    cache = str(tmp_path / "cache")
    expected = open_corpus(source, number_tokenizer, cache).tokens.tolist()
    tokens = next((tmp_path / "cache").rglob("tokens.npy"))
    if damage == "truncated":
        os.truncate(tokens, tokens.stat().st_size - 4)
    elif damage == "changed":
        tokens.write_bytes(tokens.read_bytes()[:-4] + b"\x09\x00\x00\x00")
    elif damage == "missing":
        tokens.unlink()
    elif damage == "record":
        (tokens.parent / "complete.json").write_text('{"format": 1')
    else:
        (tokens.parent / "complete.json").unlink()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert open_corpus(source, number_tokenizer, cache).tokens.tolist() == expected
    assert [record.message.count("is damaged") for record in caplog.records] == [1]


def test_digest_of_a_large_file_sees_its_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the limit only blocks are read; a changed first or last byte or size still shows."""
    monkeypatch.setattr("torchtitan_dmuon.data.cache._WHOLE_DIGEST_BYTES", 64)
    monkeypatch.setattr("torchtitan_dmuon.data.cache._BLOCK_BYTES", 8)
    path = tmp_path / "x"
    digests = set()
    for data in (b"a" * 999, b"b" + b"a" * 998, b"a" * 998 + b"b", b"a" * 998, b"a" * 1000):
        path.write_bytes(data)
        digests.add(file_digest(path))
    assert len(digests) == 5


class LoggedSource:
    """A source that notes each time its documents are read, and reads them slowly."""

    name = "logged"
    text_key = "text"

    def __init__(self, log: Path, seconds: float) -> None:
        self.log = log
        self.seconds = seconds
        self.files = (None,)

    def inventory(self) -> list[tuple[str, int, int]]:
        return [("x", 1, 1)]

    def documents(self) -> Iterator[str]:
        with self.log.open("a") as file:
            file.write("read\n")
        for _ in range(4):
            time.sleep(self.seconds / 4)
            yield "1 2 3 4"


def in_fork(function: Callable[..., None], *arguments: Any) -> Any:
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


def open_logged(source: TextSource, tokenizer: BaseTokenizer, cache: Path) -> None:
    corpus = open_corpus(source, tokenizer, str(cache))
    assert corpus.tokens.tolist() == [1, 2, 3, 4] * 4


def test_four_processes_build_once(tmp_path: Path, number_tokenizer: BaseTokenizer) -> None:
    """Ranks that start together tokenise once; all of them get the result."""
    source = LoggedSource(tmp_path / "log", 0.4)
    processes = [
        in_fork(open_logged, source, number_tokenizer, tmp_path / "cache") for _ in range(4)
    ]
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert (tmp_path / "log").read_text() == "read\n"


def test_killed_builder_leaves_nothing_behind(
    tmp_path: Path, number_tokenizer: BaseTokenizer
) -> None:
    """A process killed in the middle leaves no entry; the next one clears up and builds."""
    log = tmp_path / "log"
    slow: Any = LoggedSource(log, 60)
    process = in_fork(open_logged, slow, number_tokenizer, tmp_path / "cache")
    deadline = time.monotonic() + 20
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    corpora = tmp_path / "cache" / "corpora"
    assert len(list(corpora.glob("*.tmp-*"))) == 1
    quick: Any = LoggedSource(log, 0)
    open_logged(quick, number_tokenizer, tmp_path / "cache")
    assert not list(corpora.glob("*.tmp-*"))
    assert log.read_text() == "read\nread\n"


def test_waiting_is_bounded(tmp_path: Path) -> None:
    """A process that waits too long for another stops and says for what, and how long."""

    def build_slowly(folder: Path) -> None:
        (tmp_path / "started").touch()
        time.sleep(60)

    def hold() -> None:
        cached_folder(tmp_path / "cache", "key", build_slowly, what="tokens of 'x'")

    process = in_fork(hold)
    deadline = time.monotonic() + 20
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(TimeoutError, match=r"Waited 0 s .* making the tokens of 'x' and holds"):
        cached_folder(
            tmp_path / "cache", "key", build_slowly, what="tokens of 'x'", lock_timeout_seconds=0.2
        )
    process.kill()
    process.join(10)


def test_failed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    """An error while building reaches the caller and leaves only the lock file."""

    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cached_folder(tmp_path, "key", fail, what="thing")
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]
