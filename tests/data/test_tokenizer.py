"""The tokenizer that is trained on the corpus, and the one that is only a size."""

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from torchtitan_dmuon.data import (
    CorpusTokenizer,
    VocabOnlyTokenizer,
    loader_config,
    open_source,
    tokenizer_digest,
)
from torchtitan_dmuon.data import tokenizer as tokenizer_module
from torchtitan_dmuon.data.tokenizer import spaced_sample

WriteJsonl = Callable[..., Path]


def config(path: Path, cache: Path, vocab_size: int = 300) -> CorpusTokenizer.Config:
    return CorpusTokenizer.Config(
        vocab_size=vocab_size,
        dataset="local_files",
        dataset_path=str(path),
        cache_folder=str(cache),
    )


def build(path: Path, cache: Path, vocab_size: int = 300) -> CorpusTokenizer:
    built: CorpusTokenizer = config(path, cache, vocab_size).build(tokenizer_path="not read")
    return built


def test_same_corpus_same_vocabulary(
    tmp_path: Path, prose: list[str], write_jsonl: WriteJsonl, tokenizer: CorpusTokenizer
) -> None:
    """Training is a function of the documents: another file, time and folder give equal files."""
    path = write_jsonl(tmp_path / "copy.jsonl", prose)
    again = build(path, tmp_path / "cache")
    assert tokenizer_digest(again) == tokenizer_digest(tokenizer)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        files = [Path(one.tokenizer_path, name).read_bytes() for one in (again, tokenizer)]
        assert files[0] == files[1]
    assert tokenizer_digest(build(path, tmp_path / "cache", 280)) != tokenizer_digest(tokenizer)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text())
def test_any_text_survives(text: str, tokenizer: CorpusTokenizer) -> None:
    """decode(encode(x)) == x for any text, all of whose ids are in the vocabulary."""
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 < token < tokenizer.get_vocab_size() for token in ids)


def test_every_byte_has_a_token(tokenizer: CorpusTokenizer) -> None:
    """All 256 bytes are tokens of their own, so bytes that never occurred are representable."""
    vocabulary = tokenizer.get_vocab()
    assert all(symbol in vocabulary for symbol in pre_tokenizers.ByteLevel.alphabet())
    text = bytes(range(256)).decode("latin-1")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_end_of_text(tokenizer: CorpusTokenizer) -> None:
    """A document ends with EOS, which its own text can not contain; no BOS is added."""
    assert tokenizer.eos_id == 0 and tokenizer.bos_id is None
    assert tokenizer.encode("a", add_bos=True, add_eos=True) == [*tokenizer.encode("a"), 0]
    literal = tokenizer.encode("a<|endoftext|>b")
    assert 0 not in literal and tokenizer.decode(literal) == "a<|endoftext|>b"
    files = json.loads(Path(tokenizer.tokenizer_path, "tokenizer_config.json").read_text())
    assert files["eos_token"] == "<|endoftext|>"


def test_vocabulary_size(
    tmp_path: Path,
    prose_file: Path,
    tokenizer: CorpusTokenizer,
    write_jsonl: WriteJsonl,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The size asked for is what one gets; too small a corpus is reported, too small a size is
    refused."""
    assert tokenizer.get_vocab_size() == 300
    small = build(write_jsonl(tmp_path / "x.jsonl", ["ab ab"]), tmp_path / "cache")
    assert 257 <= small.get_vocab_size() < 300
    assert "tokens instead of 300" in caplog.text
    with pytest.raises(ValueError, match="vocab_size: expected more than 256"):
        config(prose_file, tmp_path, 256)
    with pytest.raises(ValueError, match="is an empty corpus"):
        build(write_jsonl(tmp_path / "y.jsonl", ["", ""]), tmp_path / "cache")
    with pytest.raises(ValueError, match="'fineweb_edu' is streamed, not a set of local files"):
        CorpusTokenizer.Config(dataset="fineweb_edu").build(tokenizer_path="")


def test_trained_once_and_rebuilt_when_damaged(
    tmp_path: Path,
    prose_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A second build reads the cache; a cut file is found and trained again with one warning."""
    first = build(prose_file, tmp_path)
    path = Path(first.tokenizer_path, "tokenizer.json")
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer_module, "_train", None)
        assert tokenizer_digest(build(prose_file, tmp_path)) == tokenizer_digest(first)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    build(prose_file, tmp_path)
    assert path.read_bytes() == whole
    assert caplog.text.count("is damaged") == 1


def test_four_processes_train_once(
    tmp_path: Path, prose_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that start together train one tokenizer; all of them get it."""
    train = tokenizer_module._train

    def logged_train(*arguments: Any) -> None:
        with (tmp_path / "log").open("a") as file:
            file.write("trained\n")
        train(*arguments)

    def child() -> None:
        assert build(prose_file, tmp_path / "cache").get_vocab_size() == 300

    monkeypatch.setattr(tokenizer_module, "_train", logged_train)
    processes = [multiprocessing.get_context("fork").Process(target=child) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert (tmp_path / "log").read_text() == "trained\n"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=60), limit=st.integers(1, 60))
def test_training_sample_is_evenly_spaced(sizes: list[int], limit: int) -> None:
    """The sample is every k-th document, k a power of two, within the limit and no smaller than
    needed; one document is always kept."""
    texts = [f"{number:03d}"[:1] * size for number, size in enumerate(sizes)]
    kept = spaced_sample(texts, limit, 5)
    cut = [text[:5] for text in texts]
    candidates = [cut[:: 2**power] for power in range(7)]
    fitting = [c for c in candidates if sum(map(len, c)) <= limit or len(c) == 1]
    assert kept in candidates
    assert len(kept) <= len(fitting[0]) and (kept in fitting)


def test_vocab_only_tokenizer() -> None:
    """It has a size and no text: encoding says which tokenizer to use instead."""
    tokenizer = VocabOnlyTokenizer.Config(vocab_size=77).build(tokenizer_path="not read")
    assert tokenizer.get_vocab_size() == 77 and tokenizer.eos_id is None
    with pytest.raises(NotImplementedError, match=r"can not encode text.*CorpusTokenizer"):
        tokenizer.encode("a", add_bos=True, add_eos=True)
    with pytest.raises(NotImplementedError, match="can not decode"):
        tokenizer.decode([1])
    with pytest.raises(ValueError, match="vocab_size: expected at least 1, not 0"):
        VocabOnlyTokenizer.Config(vocab_size=0)


def test_real_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default data set works as it comes: megabytes of text, a vocabulary of the size asked
    for, thousands of windows, and text that can be read back."""
    monkeypatch.setattr(tokenizer_module, "_TRAINING_CHARACTERS", 2**20)  # to take less time
    tokenizer = CorpusTokenizer.Config(cache_folder=str(tmp_path)).build(tokenizer_path="not read")
    assert tokenizer.get_vocab_size() == 2048
    loader = loader_config("python_stdlib", shuffle=False, cache_folder=str(tmp_path)).build(
        dp_world_size=2, dp_rank=0, tokenizer=tokenizer, seq_len=256, local_batch_size=4
    )
    assert loader.corpus.info.num_documents > 100
    assert loader.num_windows > 2000
    inputs, _ = next(iter(loader))
    first = next(open_source("python_stdlib").documents())
    assert first.startswith(tokenizer.decode(inputs["input"][0].tolist()))
