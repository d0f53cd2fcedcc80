"""Reading documents from text, JSON-lines and Parquet files, one document at a time.

| files | documents |
|---|---|
| ``.txt .md .rst .py ...`` (``TEXT_SUFFIXES``) | the whole file is one document, UTF-8 |
| ``.jsonl .ndjson .json`` | one JSON object per line; the document is its ``text_key`` |
| ``.parquet`` | one document per row; the document is the column ``text_key`` |

Text and JSON-lines files may also be compressed: ``.gz`` or ``.zst`` after the suffix.
"""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal, cast

import pyarrow as pa
import pyarrow.parquet as pq

from torchtitan_dmuon.config.errors import ConfigError, nearest

FileKind = Literal["text", "jsonl", "parquet"]

# fmt: off
TEXT_SUFFIXES = (
    ".txt", ".text", ".md", ".rst", ".tex", ".html", ".toml", ".yaml", ".yml",
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh",
    ".java", ".js", ".ts", ".go", ".rs", ".sh",
)
# fmt: on
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIXES = (".parquet",)
COMPRESSION_SUFFIXES = (".gz", ".zst")

MAX_TEXT_FILE_BYTES = 32 * 2**20
"""Largest plain-text file: it is one document, tokenised in one piece, for which the tokenizers
library needs about 140 bytes of memory per byte of text (measured), so this one needs 4.5 GB."""

_PARQUET_BATCH_ROWS = 1024
# What a damaged file raises, depending on its format and on where the damage is.
_DAMAGE_ERRORS = (OSError, EOFError, zlib.error, pa.ArrowException)


def file_kind(path: Path) -> FileKind | None:
    """How a file of this name is read, or None if its suffix is not supported."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PARQUET_SUFFIXES:
        return "parquet"
    if suffixes and suffixes[-1] in COMPRESSION_SUFFIXES:
        suffixes.pop()
    if suffixes and suffixes[-1] in JSONL_SUFFIXES:
        return "jsonl"
    if suffixes and suffixes[-1] in TEXT_SUFFIXES:
        return "text"
    return None


def supported_suffixes() -> str:
    """The accepted file suffixes, for messages."""
    names = " ".join((*JSONL_SUFFIXES, *PARQUET_SUFFIXES, *TEXT_SUFFIXES))
    return f"{names} (text and JSON lines also with {' or '.join(COMPRESSION_SUFFIXES)})"


def read_documents(path: Path, text_key: str) -> Iterator[str]:
    """Yield the documents of one file, holding no more than one of them (or one Parquet batch).

    Raises:
        ValueError: The suffix is not supported, the file is damaged, not UTF-8 or too large to be
            one document, or a row lacks ``text_key`` or holds something other than text there.
            The message names the file, the line or row where known, and what was expected.
        FileNotFoundError, PermissionError: As raised by the operating system.
    """
    kind = file_kind(path)
    if kind == "text":
        yield _read_text(path)
    elif kind == "jsonl":
        yield from _read_jsonl(path, text_key)
    elif kind == "parquet":
        yield from _read_parquet(path, text_key)
    else:
        hint = nearest(path.suffix, (*JSONL_SUFFIXES, *PARQUET_SUFFIXES, *TEXT_SUFFIXES))
        raise ConfigError(
            f"{path}: unsupported suffix '{path.suffix}', expected one of "
            f"{supported_suffixes()}{hint}"
        )


def _open(path: Path) -> IO[bytes]:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if suffix == ".zst":
        # pyarrow, which the datasets library needs anyway, brings its own zstd.
        stream = pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")
        return cast(IO[bytes], io.BufferedReader(stream))
    return path.open("rb")


def _raise_if_system_error(error: BaseException) -> None:
    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
        raise error


def _read_text(path: Path) -> str:
    try:
        with _open(path) as stream:
            data = stream.read(MAX_TEXT_FILE_BYTES + 1)
    except _DAMAGE_ERRORS as error:
        _raise_if_system_error(error)
        raise ConfigError(f"{path}: damaged file: {error}") from error
    if len(data) > MAX_TEXT_FILE_BYTES:
        raise ConfigError(
            f"{path}: a plain-text file is one document and may have up to "
            f"{MAX_TEXT_FILE_BYTES} bytes; cut it into documents, as several files or as "
            'JSON lines ({"text": "..."})'
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: expected UTF-8 text, byte {error.start} is {data[error.start]:#04x}; "
            "convert the file to UTF-8"
        ) from error


def _read_jsonl(path: Path, text_key: str) -> Iterator[str]:
    number = 0
    try:
        with _open(path) as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield _text_of_line(line, text_key, f"{path}, line {number}")
    except _DAMAGE_ERRORS as error:
        _raise_if_system_error(error)
        raise ConfigError(f"{path}: damaged file after line {number}: {error}") from error


def _text_of_line(line: bytes, text_key: str, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: expected one JSON object per line: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected a JSON object, found {type(row).__name__}")
    if text_key not in row:
        raise ConfigError(_missing_key(where, text_key, list(row)))
    text = row[text_key]
    if not isinstance(text, str):
        raise ConfigError(f"{where}: '{text_key}' holds {type(text).__name__}, expected text")
    if b"\\u" in line:
        # JSON can spell half of a surrogate pair, which is not a character.
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{where}: '{text_key}' holds the lone surrogate {error.object[error.start]!a} at "
                f"character {error.start}, which is not valid text"
            ) from error
    return text


def _read_parquet(path: Path, text_key: str) -> Iterator[str]:
    row = 0
    try:
        with pq.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if text_key not in columns:
                raise ConfigError(_missing_key(str(path), text_key, columns))
            batches = file.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=[text_key])
            for batch in batches:
                for text in batch.column(0).to_pylist():
                    if not isinstance(text, str):
                        raise ConfigError(
                            f"{path}, row {row}: '{text_key}' holds {type(text).__name__}, "
                            "expected text"
                        )
                    row += 1
                    yield text
    except _DAMAGE_ERRORS as error:
        _raise_if_system_error(error)
        raise ConfigError(f"{path}: damaged Parquet file at or after row {row}: {error}") from error


def _missing_key(where: str, text_key: str, found: list[str]) -> str:
    hint = nearest(text_key, found) or "."
    return (
        f"{where}: no '{text_key}', found the keys {sorted(found)}{hint} "
        "Set text_key to the one that holds the text."
    )
