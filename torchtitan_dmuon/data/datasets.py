"""Named data sets, and the local text files that a name and a path stand for.

| name | kind | documents |
|---|---|---|
| ``python_stdlib`` | corpus | the source files of the running Python's standard library |
| ``local_files`` | corpus | text, JSON-lines and Parquet files below ``dataset_path`` |
| ``fineweb_edu`` | streamed | ``HuggingFaceFW/fineweb-edu``, or a local mirror of it |
| ``random_tokens`` | random | none: token ids drawn from a seed |

A *corpus* is tokenised once into a cache and read by ``CorpusDataLoader``; a *streamed* set is
read while training by ``StreamingDataLoader``. Every other name in torchtitan's registry (``c4``)
counts as streamed.
"""

import functools
import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import datasets as hf_datasets
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

from torchtitan_dmuon.config.errors import ConfigError, nearest

from .readers import (
    JSONL_SUFFIXES,
    PARQUET_SUFFIXES,
    TEXT_SUFFIXES,
    file_kind,
    read_documents,
    supported_suffixes,
)

DatasetKind = Literal["corpus", "streamed", "random"]

PYTHON_STDLIB = "python_stdlib"
LOCAL_FILES = "local_files"
FINEWEB_EDU = "fineweb_edu"
RANDOM_TOKENS = "random_tokens"

_KINDS: dict[str, DatasetKind] = {
    PYTHON_STDLIB: "corpus",
    LOCAL_FILES: "corpus",
    FINEWEB_EDU: "streamed",
    RANDOM_TOKENS: "random",
}
_FINEWEB_REPOSITORY = "HuggingFaceFW/fineweb-edu"
_FINEWEB_SUBSET = "sample-10BT"
# Where a copy of the repository keeps that subset.
_FINEWEB_SUBSET_FOLDER = "sample/10BT"

# Tests, applications and generated tables: much text, little of it written as library code, and
# some distributors leave it out.
_STDLIB_SKIPPED_FOLDERS = frozenset(
    [
        "test",
        "tests",
        "idle_test",
        "idlelib",
        "lib2to3",
        "turtledemo",
        "pydoc_data",
        "encodings",
        "site-packages",
        "dist-packages",
        "__pycache__",
    ]
)
# Written when Python is built or installed: differ between machines with the same Python.
_STDLIB_SKIPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a data set: where it is, and the name that it is known by on any machine."""

    path: Path
    name: str

    def stamp(self) -> tuple[str, int, int]:
        """(name, bytes, modification time in ns); changes when the file is written."""
        status = self.path.stat()
        return self.name, status.st_size, status.st_mtime_ns


@dataclass(frozen=True, slots=True)
class TextSource:
    """The documents of a corpus, in an order that is the same on every machine.

    Attributes:
        name: Name of the data set.
        files: Its files, sorted by ``SourceFile.name``; never empty.
        text_key: Key (JSON lines) or column (Parquet) that holds the text.
    """

    name: str
    files: tuple[SourceFile, ...]
    text_key: str

    def documents(self) -> Iterator[str]:
        """Yield the documents; errors as in ``read_documents``."""
        return _documents([str(file.path) for file in self.files], self.text_key, self.name)

    def inventory(self) -> list[tuple[str, int, int]]:
        """The ``SourceFile.stamp`` of each file: what the documents depend on."""
        return [file.stamp() for file in self.files]


def dataset_names() -> list[str]:
    """Every name that ``dataset_kind`` accepts, sorted."""
    return sorted({*_KINDS, *DATASETS})


def dataset_kind(dataset: str) -> DatasetKind:
    """How the data set of this name is read.

    Raises:
        ValueError: There is no such data set; the message names the nearest and all.
    """
    if dataset in _KINDS:
        return _KINDS[dataset]
    if dataset in DATASETS:
        return "streamed"
    names = dataset_names()
    raise ConfigError(
        f"dataset: no data set is called '{dataset}'{nearest(dataset, names) or '.'} Known are "
        f"{', '.join(names)}. For files of your own set dataset = '{LOCAL_FILES}' and dataset_path."
    )


def open_source(
    dataset: str, dataset_path: str | None = None, text_key: str = "text"
) -> TextSource:
    """Find the files of a data set of kind "corpus".

    Args:
        dataset: ``python_stdlib`` or ``local_files``.
        dataset_path: For ``local_files`` a file, a folder (searched recursively, hidden names and
            unsupported suffixes are passed over) or a glob pattern (``**`` matches any folders).
            For ``python_stdlib`` the library folder of another Python.
        text_key: Key (JSON lines) or column (Parquet) that holds the text.

    Raises:
        ValueError: Unknown name, a data set of another kind, no such path, no file in it, or an
            unsupported suffix.
    """
    kind = dataset_kind(dataset)
    if kind != "corpus":
        corpora = [name for name, other in _KINDS.items() if other == "corpus"]
        raise ConfigError(
            f"dataset: '{dataset}' is {kind}, not a set of local files; "
            f"expected one of {', '.join(corpora)}"
        )
    if dataset == PYTHON_STDLIB:
        files = _stdlib_files(Path(dataset_path or sysconfig.get_path("stdlib")))
    else:
        files = _local_files(dataset_path)
    return TextSource(name=dataset, files=tuple(files), text_key=text_key)


def register_datasets() -> None:
    """Make our data sets known to torchtitan's own loaders; calling it again changes nothing.

    ``random_tokens`` has no documents and is not registered. torchtitan's loaders read
    ``local_files`` with the key "text" and read every set in its own order; shuffling by a seed
    is what ``StreamingDataLoader`` adds.

    Raises:
        ValueError: Another package has registered one of the names.
    """
    entries = _registry_entries()
    for name, entry in entries.items():
        if DATASETS.get(name, entry) is not entry:
            raise ConfigError(
                f"torchtitan's registry already has another data set called '{name}'; "
                "register that one under another name"
            )
    DATASETS.update(entries)


@functools.cache
def _registry_entries() -> dict[str, DatasetConfig]:
    return {
        PYTHON_STDLIB: DatasetConfig(
            path=sysconfig.get_path("stdlib"),
            loader=functools.partial(_load_corpus, PYTHON_STDLIB),
            sample_processor=_text,
        ),
        LOCAL_FILES: DatasetConfig(
            path="",
            loader=functools.partial(_load_corpus, LOCAL_FILES),
            sample_processor=_text,
        ),
        FINEWEB_EDU: DatasetConfig(
            path=_FINEWEB_REPOSITORY, loader=_load_fineweb_edu, sample_processor=_text
        ),
    }


def _text(sample: dict[str, Any]) -> str:
    return str(sample["text"])


def _load_corpus(dataset: str, path: str) -> hf_datasets.IterableDataset:
    source = open_source(dataset, path)
    files = [str(file.path) for file in source.files]
    return hf_datasets.IterableDataset.from_generator(
        _samples, gen_kwargs={"files": files, "dataset": dataset}
    )


def _samples(files: Sequence[str], dataset: str) -> Iterator[dict[str, str]]:
    for text in _documents(files, "text", dataset):
        yield {"text": text}


def _documents(files: Sequence[str], text_key: str, dataset: str) -> Iterator[str]:
    for file in files:
        if dataset == PYTHON_STDLIB:
            try:
                yield Path(file).read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                continue  # a handful of sources are in another encoding on purpose
        else:
            yield from read_documents(Path(file), text_key)


def _load_fineweb_edu(path: str) -> hf_datasets.IterableDataset:
    if os.path.exists(path):
        root = Path(path)
        subset = root / _FINEWEB_SUBSET_FOLDER
        files = _local_files(str(subset if subset.is_dir() else root))
        found = [str(file.path) for file in files if file_kind(file.path) == "parquet"]
        if not found:
            raise ConfigError(f"dataset_path: {path} holds no .parquet file of '{FINEWEB_EDU}'")
        return hf_datasets.load_dataset("parquet", data_files=found, split="train", streaming=True)
    if path.count("/") != 1 or path.startswith((".", "~", "/")):
        raise ConfigError(
            f"dataset_path: {path} does not exist; for '{FINEWEB_EDU}' give a folder with its "
            f"Parquet files or a Hugging Face repository such as '{_FINEWEB_REPOSITORY}'"
        )
    try:
        return hf_datasets.load_dataset(path, name=_FINEWEB_SUBSET, split="train", streaming=True)
    except ConnectionError as error:
        raise ConnectionError(
            f"'{FINEWEB_EDU}' is streamed from {path} on the Hugging Face Hub, which can not be "
            f"reached ({error}). Set dataset_path to a local copy of its Parquet files, or train "
            f"on dataset = '{PYTHON_STDLIB}', which needs no network."
        ) from error


def _stdlib_files(root: Path) -> list[SourceFile]:
    if not (root / "os.py").is_file():
        raise ConfigError(
            f"dataset_path: {root} is no Python standard library (it has no os.py), which is what "
            f"'{PYTHON_STDLIB}' reads; for files of your own set dataset = '{LOCAL_FILES}'"
        )
    files = [
        file
        for file in _walk(root, _STDLIB_SKIPPED_FOLDERS)
        if file.path.suffix == ".py" and not file.path.name.startswith(_STDLIB_SKIPPED_FILES)
    ]
    # Build configuration lives in folders such as config-3.11-x86_64-linux-gnu.
    return [file for file in files if not file.name.startswith("config-")]


def _local_files(dataset_path: str | None) -> list[SourceFile]:
    if not dataset_path:
        raise ConfigError(
            f"dataset_path: '{LOCAL_FILES}' needs the path of a file, a folder or a glob pattern"
        )
    path = Path(dataset_path).expanduser()
    if path.is_dir():
        files = [file for file in _walk(path) if file_kind(file.path)]
        if not files:
            raise ConfigError(
                f"dataset_path: no readable file below the folder {path}; expected files that end "
                f"in one of {supported_suffixes()}"
            )
        return files
    if path.is_file():
        files = [SourceFile(path=path, name=path.name)]
    elif glob.has_magic(str(path)):
        files = _glob_files(str(path))
    else:
        raise ConfigError(_missing_path(path))
    for file in files:
        if file_kind(file.path) is None:
            suffixes = (*JSONL_SUFFIXES, *PARQUET_SUFFIXES, *TEXT_SUFFIXES)
            raise ConfigError(
                f"dataset_path: {file.path} has the unsupported suffix '{file.path.suffix}'"
                f"{nearest(file.path.suffix, suffixes)} Expected one of {supported_suffixes()}."
            )
    return files


def _glob_files(pattern: str) -> list[SourceFile]:
    paths = sorted(Path(name) for name in glob.glob(pattern, recursive=True))
    paths = [path for path in paths if path.is_file()]
    if not paths:
        raise ConfigError(f"dataset_path: no file matches the pattern {pattern}")
    base = os.path.commonpath([path.parent for path in paths])
    files = [SourceFile(path=path, name=_relative(path, base)) for path in paths]
    return sorted(files, key=lambda file: file.name)


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> list[SourceFile]:
    files: list[SourceFile] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name for name in subfolders if name not in skipped and not name.startswith(".")
        ]
        paths = [Path(folder, name) for name in names if not name.startswith(".")]
        files += [SourceFile(path=path, name=_relative(path, root)) for path in paths]
    return sorted(files, key=lambda file: file.name)


def _relative(path: Path, base: str | Path) -> str:
    return Path(os.path.relpath(path, base)).as_posix()


def _missing_path(path: Path) -> str:
    # Name the first folder on the way that is missing, and what stands there instead.
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    hint = ""
    if missing.parent.is_dir():
        hint = nearest(missing.name, os.listdir(missing.parent))
    return f"dataset_path: {path} does not exist ({missing} is missing){hint}"
