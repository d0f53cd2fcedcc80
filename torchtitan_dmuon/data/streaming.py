"""A loader for data sets that are too large to tokenise beforehand and are read while training.

torchtitan's ``HuggingFaceTextDataset`` does the reading, packing and splitting by rank. Added
here: an order drawn from a seed, exact resumption in that order, and a state without pickle.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from datasets import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader, HuggingFaceTextDataset

from torchtitan_dmuon.config.errors import ConfigError, nearest

from .corpus import tokenizer_digest
from .datasets import FINEWEB_EDU, LOCAL_FILES, PYTHON_STDLIB, dataset_kind, register_datasets
from .order import check_seed, permutation
from .state import REMEDY, check_state

# Sets whose text key the user may choose; torchtitan's own bring their own processing.
_KEYED = (FINEWEB_EDU, LOCAL_FILES, PYTHON_STDLIB)


class StreamedTextDataset(HuggingFaceTextDataset):  # type: ignore[misc]
    """torchtitan's packed text data set, in an order drawn from a seed.

    A streamed set is shuffled in blocks: ``shuffle_block`` documents are read, then handed out in
    the order ``permutation(n, seed, epoch, block number)``. Unlike the shuffle buffer of the
    datasets library, whose content is lost when a run resumes, a block can be read again, so the
    state is the place where the block begins and how much of it was used. A set that is loaded as
    a whole (``datasets.Dataset``) is shuffled as a whole.
    """

    _original_data: Any
    _data: Any

    def __init__(
        self,
        *,
        seed: int,
        shuffle_block: int,
        text_key: str | None,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self._seed = seed
        self.shuffle_block = shuffle_block
        self._streamed = isinstance(self._data, IterableDataset)
        if text_key is not None:
            self._text_processor = _TextOf(self.dataset_name, text_key)
        if not self._streamed and shuffle_block > 0:
            self._original_data = self._original_data.shuffle(seed=seed)
            self._data = self._original_data
        # Where the current block begins in the underlying set, the block's number in the epoch,
        # and how many of its documents were handed out.
        self._first_state = self._data.state_dict() if self._streamed else {}
        self._block_start: dict[str, Any] = self._first_state
        self._block = 0
        self._used_of_block = 0
        self._empty_epochs = 0

    @property
    def _in_blocks(self) -> bool:
        return self._streamed and self.shuffle_block > 0

    def _get_data_iter(self) -> Iterator[dict[str, Any]]:
        if self._in_blocks:
            return self._shuffled()
        return super()._get_data_iter()  # type: ignore[no-any-return]

    def _shuffled(self) -> Iterator[dict[str, Any]]:
        rows = iter(self._data)
        while block := list(islice(rows, self.shuffle_block)):
            order = permutation(len(block), self._seed, self._epoch, self._block)
            for index in order[self._used_of_block :]:
                self._used_of_block += 1
                yield block[index]
            self._block_start = self._data.state_dict()
            self._block += 1
            self._used_of_block = 0

    def reloop(self) -> None:
        """Begin the next epoch.

        Raises:
            ValueError: This rank has no documents, and would look for one forever.
        """
        # One empty epoch is normal: a run that resumed at the very end of one.
        self._empty_epochs = 0 if self._sample_idx else self._empty_epochs + 1
        if self._empty_epochs > 1:
            raise ConfigError(
                f"dataset: '{self.dataset_name}' has no document for this data-parallel rank; "
                "use fewer ranks or a set with more documents"
            )
        super().reloop()
        self._block_start = {**self._first_state, "epoch": self._epoch}
        self._block = 0
        self._used_of_block = 0

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, and the tokens that were read and not yet handed out."""
        state: dict[str, Any] = super().state_dict()
        if self._in_blocks:
            state["data"] = self._block_start
            state["block"] = self._block
            state["used_of_block"] = self._used_of_block
        state["epoch"] = self._epoch
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state of ``state_dict``."""
        super().load_state_dict(state_dict)
        if self._in_blocks:
            self._block_start = state_dict["data"]
            self._block = state_dict["block"]
            self._used_of_block = state_dict["used_of_block"]


class _TextOf:
    """Takes the text of a sample, or says which keys there are."""

    def __init__(self, dataset: str, text_key: str) -> None:
        self.dataset = dataset
        self.text_key = text_key

    def __call__(self, sample: dict[str, Any]) -> str:
        text = sample.get(self.text_key)
        if isinstance(text, str):
            return text
        if self.text_key in sample:
            raise ConfigError(
                f"text_key: '{self.text_key}' of '{self.dataset}' holds {type(text).__name__}, "
                "expected text"
            )
        raise ConfigError(
            f"text_key: samples of '{self.dataset}' have no '{self.text_key}', found the keys "
            f"{sorted(sample)}{nearest(self.text_key, sample) or '.'}"
        )


class StreamingDataLoader(HuggingFaceTextDataLoader):  # type: ignore[misc]
    """torchtitan's text loader for streamed sets, shuffled by a seed, with a state in JSON.

    Documents are split over the D data-parallel ranks without overlap: by file if the number of
    files is a multiple of D, else document by document. Which rank holds what therefore depends on
    D, and so does the state: it resumes on the same number of ranks only. On a larger number
    torch.distributed.checkpoint itself reports ``dataloader.dp_rank_N`` as a missing key.
    Without ``infinite`` ranks can run out of data after different batches.

    Batches are ``({"input", "positions"}, labels)``, each int64 [B, L]. The state has one entry of
    JSON text per rank (``dp_rank_N``); reading it back runs no code.

    Raises:
        ValueError: From the constructor: unknown data set or path. While iterating: a sample
            without the text key.
        ConnectionError: The set is not on this machine and the Hub can not be reached.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTextDataLoader.Config):  # type: ignore[misc]
        dataset: str = FINEWEB_EDU
        """Name of the data set: fineweb_edu, or any set registered with torchtitan."""

        dataset_path: str | None = None
        """Another Hugging Face repository, or a local folder or file with a copy of the set."""

        text_key: str = "text"
        """Key that holds the text; sets of torchtitan's own (c4) know theirs and ignore it."""

        seed: int = 42
        """Seed of the order of the documents; at least 0."""

        shuffle: bool = True
        """Read documents in an order drawn from the seed, not in the order of the files."""

        shuffle_block: int = 1024
        """Documents that are read ahead and shuffled together on each rank. They are read again
        when a run resumes, and training waits while they are read."""

        infinite: bool = True
        """Begin the next epoch when one ends."""

        def __post_init__(self) -> None:
            check_seed(self.seed)
            if self.num_workers:
                # Measured with 2 workers: some batches after a resume are not the ones that
                # would have followed. One process tokenises far faster than one rank trains.
                raise ConfigError(
                    f"num_workers: expected 0, not {self.num_workers}; worker processes would not "
                    "resume at the exact place in a streamed data set"
                )
            if self.shuffle_block < 1:
                raise ConfigError(
                    f"shuffle_block: expected at least 1 document, not {self.shuffle_block}; "
                    "to keep the order of the files set shuffle = false"
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
        snapshot_every_n_steps: int | None = 1,
    ) -> None:
        register_datasets()
        if dataset_kind(config.dataset) == "random":
            raise ConfigError(f"dataset: '{config.dataset}' has no documents to stream")
        dataset = StreamedTextDataset(
            seed=config.seed,
            shuffle_block=config.shuffle_block if config.shuffle else 0,
            text_key=config.text_key if config.dataset in _KEYED else None,
            dataset_name=config.dataset,
            dataset_path=config.dataset_path,
            tokenizer=tokenizer,
            seq_len=seq_len,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            infinite=config.infinite,
        )
        # Past torchtitan's text loader, whose constructor makes the data set itself.
        super(HuggingFaceTextDataLoader, self).__init__(
            dataset,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            batch_size=local_batch_size,
            num_workers=0,
            pin_memory=config.pin_memory,
            snapshot_every_n_steps=snapshot_every_n_steps,
        )
        self._identity: dict[str, int | str] = {
            "world_size": dp_world_size,
            "dataset": config.dataset,
            "tokenizer": tokenizer_digest(tokenizer),
            "seq_len": seq_len,
            "seed": config.seed,
            "shuffle_block": dataset.shuffle_block,
        }

    def state_dict(self) -> dict[str, int | str]:
        """This rank's place as JSON text, and what every rank must have in common."""
        state = StatefulDataLoader.state_dict(self)
        text = json.dumps(state, separators=(",", ":"))
        if json.loads(text) != state:
            raise RuntimeError(
                f"the state of '{self._identity['dataset']}' holds values that JSON changes "
                "(tuples, or keys that are not text), so it could not be restored"
            )
        return {self._rank_id: text, **self._identity}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the last batch of this rank; an empty state changes nothing.

        Raises:
            ValueError: The state is of another number of data-parallel ranks or of other data.
        """
        if not state_dict:
            return
        check_state(state_dict, {**self._identity, self._rank_id: None})
        try:
            state = json.loads(state_dict[self._rank_id])
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"dataloader: '{self._rank_id}' of the checkpoint is not JSON text ({error}); "
                f"torchtitan's own loaders write another form; {REMEDY}"
            ) from error
        StatefulDataLoader.load_state_dict(self, state)
