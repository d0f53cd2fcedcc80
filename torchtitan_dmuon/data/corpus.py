"""A data set as token ids on disk, made once and read through a memory map.

Shapes: T tokens, N documents, P = T - N pairs, L pairs in one window.

A document of n tokens (BOS and EOS as torchtitan adds them) holds n - 1 training pairs: (token,
next token). Pairs never cross documents. The *pair stream* is the pairs of all documents in order,
and pair p of document d is made of tokens p + d and p + d + 1, because every earlier document
contributes one pair fewer than tokens. Files of one corpus, all readable by ``numpy.load`` with
``allow_pickle=False`` or as JSON:

- ``tokens.npy``: uint16 or uint32 [T], the documents back to back;
- ``pair_starts.npy``: int64 [N + 1], the first pair of each document, and P;
- ``corpus.json``: counts and digests (``CorpusInfo``).
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import tokenizers
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer

from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.log import logger

from .cache import LOCK_TIMEOUT_SECONDS, cache_root, cached_folder
from .datasets import TextSource

CORPUS_FORMAT = 1
"""Version of the files; part of the cache key, so another version never reads them."""

_TOKENS_FILE = "tokens.npy"
_STARTS_FILE = "pair_starts.npy"
_INFO_FILE = "corpus.json"

# One batch of the tokenizer. While it works, the tokenizers library needs about 140 bytes of memory
# per character, and on 2 cores (2026) batches of this size took half the time of 8 times larger
# ones.
_BATCH_CHARACTERS = 2**18
_BATCH_DOCUMENTS = 512
_REPORT_SECONDS = 10.0

Int64Array = npt.NDArray[np.int64]
Encode = Callable[[list[str]], list[list[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusInfo:
    """What is known of a corpus without reading its tokens.

    Attributes:
        dataset: Name of the data set.
        num_tokens: T, special tokens included.
        num_documents: N, documents with at least one pair.
        digest: Digest of all token ids and document bounds. Equal on any two machines that
            tokenised the same documents with the same tokenizer.
        tokenizer_digest: ``tokenizer_digest`` of the tokenizer that made it.
    """

    dataset: str
    num_tokens: int
    num_documents: int
    digest: str
    tokenizer_digest: str

    @property
    def num_pairs(self) -> int:
        """P: the number of (input, label) pairs."""
        return self.num_tokens - self.num_documents


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """An open corpus. Both arrays are memory maps: the page cache is shared by all processes.

    Attributes:
        info: Counts and digests.
        tokens: uint16 or uint32 [T].
        pair_starts: int64 [N + 1], increasing; the first pair of each document, and P.
    """

    info: CorpusInfo
    tokens: npt.NDArray[Any]
    pair_starts: Int64Array

    def window(self, start: int, length: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Pairs ``start .. start + length - 1`` of the pair stream.

        Returns:
            inputs, labels, positions: each int64 [L] with L = ``length``, newly allocated. A
            position is 0 at the start of each document and at the start of the window.

        Raises:
            IndexError: The window is empty or reaches outside the stream.
        """
        if length < 1 or start < 0 or start + length > self.info.num_pairs:
            raise IndexError(
                f"pairs {start} to {start + length} are not inside 0 to {self.info.num_pairs}"
            )
        document = int(np.searchsorted(self.pair_starts, start, side="right")) - 1
        end_document = int(np.searchsorted(self.pair_starts, start + length, side="left"))
        # Where later documents begin inside the window.
        bounds = self.pair_starts[document + 1 : end_document] - start
        first_token = start + document
        tokens = self.tokens[first_token : first_token + length + len(bounds) + 1].astype(np.int64)
        positions = np.arange(length, dtype=np.int64)
        if len(bounds) == 0:
            return tokens[:-1], tokens[1:].copy(), positions
        crossed = np.zeros(length, dtype=np.int64)
        crossed[bounds] = 1
        where = positions + np.cumsum(crossed)
        segment_start = np.zeros(length, dtype=np.int64)
        segment_start[bounds] = bounds
        positions -= np.maximum.accumulate(segment_start)
        return tokens[where], tokens[where + 1], positions


def open_corpus(
    source: TextSource,
    tokenizer: BaseTokenizer,
    cache_folder: str = "",
    *,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> Corpus:
    """Open the tokens of a data set, tokenising it first if that has not been done yet.

    The cache key covers the data set's name and text key, the names, sizes and modification times
    of its files, the tokenizer and the version of the tokenizers library. Many processes may call
    this together: one tokenises, the others wait.

    Args:
        source: The documents.
        tokenizer: Any torchtitan tokenizer; a ``HuggingFaceTokenizer`` is run in batches.
        cache_folder: See ``cache_root``.
        lock_timeout_seconds: Longest wait for another process.

    Raises:
        ValueError: A file is damaged or lacks the key, no document has a pair, or the tokenizer
            returns an id outside its vocabulary.
        TimeoutError: Another process held the lock for longer than the bound.
    """
    digest = tokenizer_digest(tokenizer)
    inputs = [
        CORPUS_FORMAT,
        source.name,
        source.text_key,
        source.inventory(),
        digest,
        tokenizers.__version__,
    ]
    key = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:40]

    def build(folder: Path) -> None:
        _tokenise(source, tokenizer, digest, folder)

    folder = cached_folder(
        cache_root(cache_folder) / "corpora",
        key,
        build,
        what=f"tokens of '{source.name}'",
        lock_timeout_seconds=lock_timeout_seconds,
    )
    return Corpus(
        info=CorpusInfo(**json.loads((folder / _INFO_FILE).read_text(encoding="utf-8"))),
        tokens=_map_array(folder / _TOKENS_FILE),
        pair_starts=_map_array(folder / _STARTS_FILE),
    )


def tokenizer_digest(tokenizer: BaseTokenizer) -> str:
    """Digest of everything that decides which ids a tokenizer returns.

    For a ``HuggingFaceTokenizer`` that is its serialised form and its BOS/EOS rules; for any other
    class its name, vocabulary size, EOS and the ids of a fixed probe text.
    """
    name = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
    facts: list[Any]
    if _is_plain_huggingface(tokenizer):
        backend = tokenizer.tokenizer
        facts = [
            backend.to_str(),
            backend.encode_special_tokens,
            tokenizer.bos_id,
            tokenizer.eos_id,
            tokenizer.hf_adds_bos,
            tokenizer.hf_adds_eos,
        ]
    else:
        probe = "def f(x):\n    return x + 1  # a1 \u00e9\u4e2d\n"
        ids = tokenizer.encode(probe, add_bos=True, add_eos=True)
        facts = [name, tokenizer.get_vocab_size(), tokenizer.eos_id, ids]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:40]


def batch_encoder(tokenizer: BaseTokenizer) -> Encode:
    """A function from texts to the ids that ``encode(text, add_bos=True, add_eos=True)`` gives.

    It uses the library's ``encode_batch_fast`` (on all cores, without the offsets that nobody reads
    here) where that gives the same ids: for a ``HuggingFaceTokenizer`` without padding, which would
    pad each text of a batch to the longest.
    """

    def encode_each(texts: list[str]) -> list[list[int]]:
        return [tokenizer.encode(text, add_bos=True, add_eos=True) for text in texts]

    if not _is_plain_huggingface(tokenizer) or tokenizer.tokenizer.padding is not None:
        return encode_each
    prefix = [] if tokenizer.hf_adds_bos or tokenizer.bos_id is None else [tokenizer.bos_id]
    suffix = [] if tokenizer.hf_adds_eos or tokenizer.eos_id is None else [tokenizer.eos_id]

    def encode_together(texts: list[str]) -> list[list[int]]:
        return [prefix + one.ids + suffix for one in tokenizer.tokenizer.encode_batch_fast(texts)]

    return encode_together


def _is_plain_huggingface(tokenizer: BaseTokenizer) -> bool:
    return (
        isinstance(tokenizer, HuggingFaceTokenizer)
        and type(tokenizer).encode is HuggingFaceTokenizer.encode
    )


def _map_array(path: Path) -> npt.NDArray[Any]:
    mapped: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return mapped.view(np.ndarray)  # a plain array over the map: slicing it costs less


def _tokenise(source: TextSource, tokenizer: BaseTokenizer, digest: str, folder: Path) -> None:
    """Write the files of a corpus into ``folder``, holding one batch of documents in memory."""
    encode = batch_encoder(tokenizer)
    id_bound = _id_bound(tokenizer)
    dtype = np.dtype("<u2") if id_bound <= 2**16 else np.dtype("<u4")
    start = time.monotonic()
    next_report = start + _REPORT_SECONDS
    characters = 0
    logger.info(
        f"Tokenising '{source.name}' ({len(source.files)} files) once, into {folder.parent}."
    )
    with (
        _ArrayFile(folder / _TOKENS_FILE, dtype) as tokens,
        _ArrayFile(folder / _STARTS_FILE, np.dtype("<i8")) as starts,
    ):
        for texts in _batches(source.documents()):
            # Fewer than two tokens hold no pair; torchtitan's loader skips such a text as well.
            documents = [ids for ids in encode(texts) if len(ids) > 1]
            _append(documents, tokens, starts, id_bound, source.name)
            characters += sum(map(len, texts))
            if time.monotonic() >= next_report:
                next_report = time.monotonic() + _REPORT_SECONDS
                logger.info(_progress(source.name, starts, tokens, characters, start))
        if tokens.length == 0:
            raise ConfigError(
                f"dataset: '{source.name}' is an empty corpus: none of its {len(source.files)} "
                f"files (the first is {source.files[0].path}) holds text to train on"
            )
        done = _progress(source.name, starts, tokens, characters, start)
        num_documents = starts.length
        starts.append(np.array([tokens.length - num_documents], dtype=np.int64))
    logger.info(f"{done} Done.")
    info = CorpusInfo(
        dataset=source.name,
        num_tokens=tokens.length,
        num_documents=num_documents,
        digest=hashlib.sha256((tokens.digest() + starts.digest()).encode()).hexdigest()[:40],
        tokenizer_digest=digest,
    )
    text = json.dumps(dataclasses.asdict(info), indent=1)
    (folder / _INFO_FILE).write_text(text, encoding="utf-8")


def _id_bound(tokenizer: BaseTokenizer) -> int:
    """One more than the largest id; the ids of a vocabulary may have gaps."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return 1 + int(max(tokenizer.get_vocab().values()))
    return int(tokenizer.get_vocab_size())


def _append(
    documents: list[list[int]],
    tokens: "_ArrayFile",
    starts: "_ArrayFile",
    id_bound: int,
    dataset: str,
) -> None:
    if not documents:
        return
    lengths = np.array([len(ids) for ids in documents], dtype=np.int64)
    ids = np.concatenate([np.array(ids, dtype=np.int64) for ids in documents])
    if ids.min() < 0 or ids.max() >= id_bound:
        raise ConfigError(
            f"tokenizer: tokenising '{dataset}' gave ids from {ids.min()} to {ids.max()}, outside "
            f"its vocabulary, whose ids end before {id_bound}"
        )
    first_pair = tokens.length - starts.length
    starts.append(first_pair + np.cumsum(lengths - 1) - (lengths - 1))
    tokens.append(ids)


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in documents:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _progress(
    name: str, starts: "_ArrayFile", tokens: "_ArrayFile", characters: int, start: float
) -> str:
    seconds = time.monotonic() - start
    return (
        f"Tokenising '{name}': {starts.length} documents, {characters / 1e6:.1f} M characters, "
        f"{tokens.length / 1e6:.2f} M tokens in {seconds:.1f} s."
    )


class _ArrayFile:
    """A one-dimensional ``.npy`` file that grows, so that it never has to fit into memory."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.length = 0
        self._dtype = dtype
        self._hash = hashlib.sha256(dtype.str.encode())
        self._file = path.open("wb")
        self._write_header()
        self._header_bytes = self._file.tell()

    def append(self, values: npt.NDArray[Any]) -> None:
        """Add values [n]; they must fit the file's dtype."""
        data = np.ascontiguousarray(values, dtype=self._dtype).data
        self._file.write(data)
        self._hash.update(data)
        self.length += len(values)

    def digest(self) -> str:
        """Hex SHA-256 of dtype and values."""
        return self._hash.hexdigest()

    def _write_header(self) -> None:
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            # NumPy pads the header so that the final length fits where the first one was.
            self._file.seek(0)
            self._write_header()
            if self._file.tell() != self._header_bytes:
                raise AssertionError("the .npy header changed its size when the array grew")
        self._file.close()
