"""Tokenizers that need no downloaded files.

``CorpusTokenizer`` is trained on the corpus at first use and kept in the cache;
``VocabOnlyTokenizer`` only has a size, for random tokens.
"""

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer

from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.log import logger

from .cache import cache_root, cached_folder
from .datasets import PYTHON_STDLIB, TextSource, open_source

END_OF_TEXT = "<|endoftext|>"
"""The only special token: the end of a document (EOS), id 0."""

_TOKENIZER_FORMAT = 1
_BYTE_TOKENS = 256
# Training reads at most this much text, evenly spaced over the corpus. On one core of a 2-core
# virtual machine (2026) the 8.8 MB of python_stdlib took 4 to 5 s; the time grows with the text.
_TRAINING_CHARACTERS = 16 * 2**20
_DOCUMENT_CHARACTERS = 2**20


class CorpusTokenizer(HuggingFaceTokenizer):  # type: ignore[misc]
    """A byte-level BPE that is trained on a corpus at first use.

    The same documents give the same vocabulary. Every byte has a token, so ``decode(encode(x)) ==
    x`` for any text, and the characters of the special token in a text are plain text: a document
    can not end itself. Training reads the whole corpus once but learns from at most 16 M characters
    of it, whole documents (cut after 1 M characters) evenly spaced over the corpus.

    ``tokenizer_path`` (torchtitan's ``hf_assets_path``) is not read. The attribute of that name is
    the cached folder with ``tokenizer.json`` and ``tokenizer_config.json``, which the Hugging Face
    libraries read as well. Processes that start together wait for the one that trains.

    Raises:
        ValueError: From the constructor: the corpus can not be read (see ``open_source``), is
            empty, or ``vocab_size`` has no room for the bytes and the special token.
        TimeoutError: Another process took too long to train.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTokenizer.Config):  # type: ignore[misc]
        vocab_size: int = 2048
        """Tokens in the vocabulary, the 256 bytes and the end-of-text token included. A very small
        corpus may give fewer."""

        dataset: str = PYTHON_STDLIB
        """Data set to train on: python_stdlib, or local_files together with dataset_path."""

        dataset_path: str | None = None
        """For local_files: a file, a folder or a glob pattern."""

        text_key: str = "text"
        """Key (JSON lines) or column (Parquet) that holds the text."""

        cache_folder: str = ""
        """Folder for the trained tokenizer; empty means the user's cache folder."""

        def __post_init__(self) -> None:
            if self.vocab_size <= _BYTE_TOKENS:
                raise ConfigError(
                    f"vocab_size: expected more than {_BYTE_TOKENS} (one token per byte, and "
                    f"'{END_OF_TEXT}'), not {self.vocab_size}"
                )

    def __init__(self, config: Config, *, tokenizer_path: str = "") -> None:
        source = open_source(config.dataset, config.dataset_path, config.text_key)
        folder = _trained_folder(source, config.vocab_size, config.cache_folder)
        super().__init__(config, tokenizer_path=str(folder))
        # Not part of tokenizer.json: the library forgets it when it saves.
        self.tokenizer.encode_special_tokens = True


class VocabOnlyTokenizer(BaseTokenizer):  # type: ignore[misc]
    """A vocabulary size without a vocabulary, for runs on random tokens. EOS is None."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        vocab_size: int = 2048
        """Number of token ids."""

        def __post_init__(self) -> None:
            if self.vocab_size < 1:
                raise ConfigError(f"vocab_size: expected at least 1, not {self.vocab_size}")

    def __init__(self, config: Config, *, tokenizer_path: str = "") -> None:
        super().__init__()
        self._vocab_size = config.vocab_size

    def get_vocab_size(self) -> int:
        """Number of token ids."""
        return self._vocab_size

    def encode(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError: there are no tokens, only a number of them."""
        self._refuse("encode")

    def decode(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError: there are no tokens, only a number of them."""
        self._refuse("decode")

    def _refuse(self, operation: str) -> NoReturn:
        raise NotImplementedError(
            f"VocabOnlyTokenizer can not {operation} text: it stands for {self._vocab_size} random "
            "token ids. For text use CorpusTokenizer, or a tokenizer in hf_assets_path."
        )


def _trained_folder(source: TextSource, vocab_size: int, cache_folder: str) -> Path:
    facts = [
        _TOKENIZER_FORMAT,
        source.name,
        source.text_key,
        source.inventory(),
        vocab_size,
        tokenizers.__version__,
    ]
    return cached_folder(
        cache_root(cache_folder) / "tokenizers",
        hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:40],
        lambda folder: _train(source, vocab_size, folder),
        what=f"tokenizer of '{source.name}'",
    )


def _train(source: TextSource, vocab_size: int, folder: Path) -> None:
    start = time.monotonic()
    logger.info(f"Training a tokenizer of {vocab_size} tokens on '{source.name}', once.")
    texts = spaced_sample(source.documents(), _TRAINING_CHARACTERS, _DOCUMENT_CHARACTERS)
    if not any(texts):
        raise ConfigError(
            f"dataset: '{source.name}' is an empty corpus: none of its {len(source.files)} files "
            f"(the first is {source.files[0].path}) holds text to train a tokenizer on"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(config, indent=1)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    size = tokenizer.get_vocab_size()
    if size < vocab_size:
        logger.warning(
            f"The tokenizer of '{source.name}' has {size} tokens instead of {vocab_size}: "
            "the corpus is too small for more."
        )
    logger.info(
        f"Trained on {len(texts)} documents, {sum(map(len, texts)) / 1e6:.1f} M characters, "
        f"in {time.monotonic() - start:.1f} s."
    )


def spaced_sample(
    documents: Iterable[str], max_characters: int, max_document_characters: int
) -> list[str]:
    """Evenly spaced documents with at most ``max_characters`` characters together.

    One pass, without knowing the number of documents: every k-th is kept, and whenever they become
    too many every other one is dropped and k doubles. Documents are cut after
    ``max_document_characters``, and one document is always kept.
    """
    kept: list[str] = []
    characters = 0
    step = 1
    for number, text in enumerate(documents):
        if number % step:
            continue
        kept.append(text[:max_document_characters])
        characters += len(kept[-1])
        while characters > max_characters and len(kept) > 1:
            kept = kept[::2]
            step *= 2
            characters = sum(map(len, kept))
    return kept
