"""Tiny corpora and tokenizers, as fixtures. All caches of these tests are in temporary folders."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from torchtitan.components.tokenizer import BaseTokenizer

from torchtitan_dmuon.data import CorpusTokenizer

WriteJsonl = Callable[..., Path]


class NumberTokenizer(BaseTokenizer):
    """Text such as "3 1 4" is its own tokens; no BOS or EOS is added."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return [int(word) for word in args[0].split() if word.isdigit()]

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return " ".join(map(str, args[0]))

    def get_vocab_size(self) -> int:
        return self.vocab_size


@pytest.fixture(scope="session")
def number_tokenizer() -> BaseTokenizer:
    """A tokenizer of 2**20 ids for texts of numbers."""
    return NumberTokenizer(1 << 20)


@pytest.fixture(scope="session")
def numbers() -> Callable[..., str]:
    """Makes a document of ``count`` different tokens of ``number_tokenizer``."""

    def make(count: int, start: int = 0) -> str:
        return " ".join(map(str, range(start, start + count)))

    return make


@pytest.fixture(scope="session")
def write_jsonl() -> WriteJsonl:
    """Writes texts as JSON lines and returns the path."""

    def write(path: Path, texts: Iterable[str], key: str = "text") -> Path:
        lines = [json.dumps({key: text}) + "\n" for text in texts]
        path.write_text("".join(lines), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def prose() -> list[str]:
    """A few short documents: code, text, an empty one, several scripts."""
    return [
        "def add(a, b):\n    return a + b\n",
        "The quick brown fox jumps over the lazy dog. " * 4,
        "",
        "class Node:\n    def __init__(self, value):\n        self.value = value\n" * 3,
        "Ein Zug f\u00e4hrt \u00fcber die Br\u00fccke. \u4e2d\u6587 \U0001f600\n" * 2,
        "x",
        "for i in range(10):\n    print(i, i * i)\n" * 5,
    ]


@pytest.fixture(scope="session")
def prose_file(
    prose: list[str], write_jsonl: WriteJsonl, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("prose") / "prose.jsonl", prose)


@pytest.fixture(scope="session")
def tokenizer(prose_file: Path, tmp_path_factory: pytest.TempPathFactory) -> CorpusTokenizer:
    """A BPE of 300 tokens, trained on ``prose``."""
    config = CorpusTokenizer.Config(
        vocab_size=300,
        dataset="local_files",
        dataset_path=str(prose_file),
        cache_folder=str(tmp_path_factory.mktemp("tokenizer_cache")),
    )
    built: CorpusTokenizer = config.build(tokenizer_path="not read")
    return built
