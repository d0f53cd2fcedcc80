"""Map-style data loaders whose samples are numbered once for the whole job.

Shapes: B local batch size, L sequence length, D data-parallel ranks.

Sample g = 0, 1, 2, ... is the same tokens whatever the number of ranks; rank r reads g = i * D + r
for i = 0, 1, ... So the set of samples in a global batch depends neither on D nor on how a global
batch is cut into micro-batches, ranks never overlap, and a run may resume on another number of
ranks with exactly the next sample.

The loaders run in the training process, without workers: for L = 2048 a sample of a corpus takes
about 80 microseconds and a random one 160 (one core, 2026), little more than handing it over from a
worker would.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

from torchtitan_dmuon.config.errors import ConfigError

from .corpus import Int64Array, open_corpus
from .datasets import PYTHON_STDLIB, RANDOM_TOKENS, dataset_kind, open_source
from .order import check_seed, permutation, raw_draws
from .state import check_state
from .streaming import StreamingDataLoader

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class IndexedDataLoader(BaseDataLoader):  # type: ignore[misc]
    """Base of the loaders with numbered samples: batching, sharding by rank, and the state.

    A subclass sets ``_identity`` and ``_end`` at the end of its constructor and provides
    ``_sample``. Iterating again continues after the last batch; a loader that has reached its end
    stays there.
    """

    def __init__(
        self, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int
    ) -> None:
        if not 0 <= dp_rank < dp_world_size:
            raise ConfigError(f"dp_rank {dp_rank} is not one of {dp_world_size} ranks")
        if seq_len < 1 or local_batch_size < 1:
            raise ConfigError(
                f"seq_len {seq_len} and local_batch_size {local_batch_size} must be at least 1"
            )
        self._dp_world_size = dp_world_size
        self._dp_rank = dp_rank
        self._seq_len = seq_len
        self._local_batch_size = local_batch_size
        self._consumed = 0
        self._end: int | None = None
        self._identity: dict[str, int | str] = {}

    @property
    def global_batch_size(self) -> int:
        """Samples that one batch takes on all ranks together, B * D."""
        return self._local_batch_size * self._dp_world_size

    @abstractmethod
    def _sample(self, index: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Inputs, labels and positions of global sample ``index``, each int64 [L]."""

    def __iter__(self) -> Iterator[Batch]:
        """Yield ``({"input", "positions"}, labels)``, each int64 [B, L] on the CPU."""
        while self._end is None or self._consumed + self.global_batch_size <= self._end:
            first = self._consumed + self._dp_rank
            stop = self._consumed + self.global_batch_size
            samples = [self._sample(g) for g in range(first, stop, self._dp_world_size)]
            inputs, labels, positions = (
                torch.from_numpy(np.stack(arrays)) for arrays in zip(*samples, strict=True)
            )
            # Counted before it is handed out: a state taken between two batches includes it.
            self._consumed = stop
            yield {"input": inputs, "positions": positions}, labels

    def state_dict(self) -> dict[str, int | str]:
        """How many samples all ranks have taken, and what they were: the same on every rank."""
        return {"samples": self._consumed, **self._identity}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the samples that the state counts; an empty state changes nothing.

        Raises:
            ValueError: The state is of other data, or of another order of it.
        """
        if not state_dict:
            return
        check_state(state_dict, {"samples": None, **self._identity})
        self._consumed = int(state_dict["samples"])


class CorpusDataLoader(IndexedDataLoader):
    """Windows of a corpus that was tokenised once, in an order given by a seed.

    The pair stream of the corpus (``corpus.py``) is cut into W windows of L pairs; what remains is
    dropped. Sample g is window ``order[g % W]`` of epoch ``g // W``, where the order is a
    permutation drawn from (seed, epoch). Without ``infinite`` there is one epoch, and the samples
    that do not fill a batch on every rank are dropped, so all ranks end after the same batch.

    ``snapshot_every_n_steps`` is accepted and not used: torchtitan's own loader copies its state
    every so many steps, this one's state is a single number that is always current.

    Raises:
        ValueError: From the constructor: see ``open_corpus``, or the corpus has fewer windows than
            one batch on every rank needs.
        TimeoutError: Another process took too long to tokenise the corpus.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        dataset: str = PYTHON_STDLIB
        """Name of the data set: python_stdlib, or local_files together with dataset_path."""

        dataset_path: str | None = None
        """For local_files: a file, a folder or a glob pattern of text, JSON-lines or Parquet
        files. For python_stdlib: the library folder of another Python."""

        text_key: str = "text"
        """Key (JSON lines) or column (Parquet) that holds the text."""

        seed: int = 42
        """Seed of the order of the windows; at least 0."""

        shuffle: bool = True
        """Read the windows of each epoch in an order drawn from the seed, not in their own."""

        infinite: bool = True
        """Begin the next epoch when one ends; without it the data end after one epoch."""

        cache_folder: str = ""
        """Folder for the tokenised corpus; empty means the user's cache folder."""

        def __post_init__(self) -> None:
            check_seed(self.seed)

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = None,
    ) -> None:
        super().__init__(
            dp_world_size=dp_world_size,
            dp_rank=dp_rank,
            seq_len=seq_len,
            local_batch_size=local_batch_size,
        )
        self._config = config
        source = open_source(config.dataset, config.dataset_path, config.text_key)
        self.corpus = open_corpus(source, tokenizer, config.cache_folder)
        info = self.corpus.info
        self.num_windows = info.num_pairs // seq_len
        if self.num_windows < self.global_batch_size:
            raise ConfigError(
                f"dataset: '{config.dataset}' has {info.num_tokens} tokens in "
                f"{info.num_documents} documents, which make {self.num_windows} windows of seq_len "
                f"{seq_len}; one batch of local_batch_size {local_batch_size} on {dp_world_size} "
                f"data-parallel ranks needs {self.global_batch_size} windows, that is "
                f"{self.global_batch_size * seq_len + info.num_documents} tokens. Use more text, a "
                "smaller seq_len or local_batch_size, or fewer ranks."
            )
        self._order: tuple[int, Int64Array] | None = None
        self._end = None if config.infinite else self.num_windows
        self._identity = {
            "tokenizer": info.tokenizer_digest,
            "corpus": info.digest,
            "seq_len": seq_len,
            "seed": config.seed,
            "shuffle": config.shuffle,
        }

    def describe(self) -> str:
        """One line: how much text there is, in which pieces."""
        info = self.corpus.info
        return (
            f"data set '{self._config.dataset}': {info.num_tokens:,} tokens in "
            f"{info.num_documents:,} documents, {self.num_windows:,} windows of {self._seq_len} "
            "in an epoch"
        )

    def _sample(self, index: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        epoch, place = divmod(index, self.num_windows)
        window = self._window_order(epoch)[place] if self._config.shuffle else place
        return self.corpus.window(int(window) * self._seq_len, self._seq_len)

    def _window_order(self, epoch: int) -> Int64Array:
        if self._order is None or self._order[0] != epoch:
            order = permutation(self.num_windows, self._config.seed, epoch)
            self._order = (epoch, order)  # only one is kept: samples are read in rising order
        return self._order[1]


class RandomTokenDataLoader(IndexedDataLoader):
    """Random token ids, for measuring speed and for smoke tests: no files, no tokenizer.

    Sample g is L + 1 ids in [0, vocabulary size), a function of (seed, g) alone and one document:
    positions are 0 .. L - 1. States and ranks follow the rules of ``CorpusDataLoader``; the
    vocabulary size takes the place of the corpus. ``snapshot_every_n_steps`` is not used.

    Raises:
        ValueError: From the constructor: a data set other than random_tokens, a dataset_path, or
            fewer ``epoch_samples`` than one batch on every rank needs when not ``infinite``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        dataset: str = RANDOM_TOKENS
        """Name of the data set: random_tokens."""

        dataset_path: str | None = None
        """Must stay unset: random tokens are read from nowhere."""

        seed: int = 42
        """Seed of the token ids; at least 0."""

        infinite: bool = True
        """Never end; without it the data end after epoch_samples samples."""

        epoch_samples: int = 1024
        """Samples, over all ranks, after which the data end when they are not infinite."""

        def __post_init__(self) -> None:
            check_seed(self.seed)
            if self.dataset != RANDOM_TOKENS:
                raise ConfigError(f"dataset: expected '{RANDOM_TOKENS}', not '{self.dataset}'")
            if self.dataset_path:
                raise ConfigError(
                    f"dataset_path: '{RANDOM_TOKENS}' reads no files; remove {self.dataset_path}"
                )

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = None,
    ) -> None:
        super().__init__(
            dp_world_size=dp_world_size,
            dp_rank=dp_rank,
            seq_len=seq_len,
            local_batch_size=local_batch_size,
        )
        self._seed = config.seed
        self._vocab_size = int(tokenizer.get_vocab_size())
        self._end = None if config.infinite else config.epoch_samples
        if self._end is not None and self._end < self.global_batch_size:
            raise ConfigError(
                f"epoch_samples: {self._end} is fewer than the {self.global_batch_size} samples of "
                f"one batch of {local_batch_size} on {dp_world_size} data-parallel ranks"
            )
        self._identity = {
            "vocab_size": self._vocab_size,
            "seq_len": seq_len,
            "seed": config.seed,
        }

    def _sample(self, index: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        draws = raw_draws(self._seq_len + 1, self._seed, index)
        ids = (draws % np.uint64(self._vocab_size)).astype(np.int64)
        return ids[:-1], ids[1:], np.arange(self._seq_len, dtype=np.int64)


def loader_config(
    dataset: str,
    dataset_path: str | None = None,
    *,
    text_key: str = "text",
    seed: int = 42,
    shuffle: bool = True,
    infinite: bool = True,
    cache_folder: str = "",
) -> BaseDataLoader.Config:
    """The config of the loader that reads this kind of data set.

    Raises:
        ValueError: There is no such data set, or the values do not fit it.
    """
    kind = dataset_kind(dataset)
    if kind == "random":
        return RandomTokenDataLoader.Config(
            dataset=dataset, dataset_path=dataset_path, seed=seed, infinite=infinite
        )
    if kind == "streamed":
        return StreamingDataLoader.Config(
            dataset=dataset,
            dataset_path=dataset_path,
            text_key=text_key,
            seed=seed,
            shuffle=shuffle,
            infinite=infinite,
        )
    return CorpusDataLoader.Config(
        dataset=dataset,
        dataset_path=dataset_path,
        text_key=text_key,
        seed=seed,
        shuffle=shuffle,
        infinite=infinite,
        cache_folder=cache_folder,
    )
