"""One checkpoint on disk: DCP's files, and a manifest with what is needed to trust and use them.

The files are those of `torch.distributed.checkpoint`, so torchtitan and DCP's own tools read them.
The manifest beside them has a checksum for every stored item, and says which model it is.
"""

from __future__ import annotations

import io
import json
import os
import queue
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtitan_dmuon.checkpoint.errors import CheckpointError
from torchtitan_dmuon.checkpoint.folder import INDEX, CheckpointFolder, remove, sync
from torchtitan_dmuon.checkpoint.metadata import read_index

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
"""Folder with the tokenizer's files, inside a checkpoint."""

_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "spiece.model",
)
_FORMAT = 1
_READ_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Archive:
    """A complete checkpoint, opened for reading.

    Attributes:
        path: Its folder.
        index: Which tensors there are, and where each box of them lies.
        manifest: What the job said of itself; None for a checkpoint that torchtitan wrote.
    """

    path: Path
    index: Metadata
    manifest: Mapping[str, Any] | None

    @classmethod
    def open(cls, path: Path) -> Archive:
        """Open a checkpoint and check that all of its files are there.

        Raises:
            CheckpointError: it is not complete, or damaged.
        """
        try:
            data = (path / INDEX).read_bytes()
        except OSError as e:
            why = "it has no .metadata" if isinstance(e, FileNotFoundError) else e.strerror
            raise CheckpointError(
                f"{path}: not a complete checkpoint ({why}); expected a folder named step-N"
            ) from None
        manifest = _read_manifest(path)
        if manifest is not None and zlib.crc32(data) != manifest["index_crc32"]:
            raise CheckpointError(f"{path / INDEX}: damaged: its checksum is not the one saved")
        archive = cls(path, read_index(data, path / INDEX), manifest)
        try:
            archive._check_files()
        except (AttributeError, TypeError, ValueError) as e:
            if isinstance(e, CheckpointError):
                raise
            raise CheckpointError(f"{path / INDEX}: damaged: {e}") from None
        return archive

    def _check_files(self) -> None:
        sizes: dict[str, int] = {}
        for info in self.index.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                raise CheckpointError(
                    f"{self.path / INDEX}: it points out of its folder, at {info.relative_path}"
                )
            end = info.offset + info.length
            sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), end)
        for name, size in sorted(sizes.items()):
            file = self.path / name
            if not file.is_file():
                raise CheckpointError(f"{file}: missing; {self.path.name} is not whole")
            if file.stat().st_size < size:
                raise CheckpointError(
                    f"{file}: truncated: {file.stat().st_size} bytes of {size}; "
                    f"{self.path.name} is not whole"
                )

    @property
    def checksums(self) -> dict[tuple[str, int], int]:
        """CRC-32 of each stored item, by file and offset; empty without a manifest."""
        if self.manifest is None:
            return {}
        return {
            (name, offset): crc
            for name, items in self.manifest["items_crc32"].items()
            for offset, crc in items
        }

    @property
    def bytes(self) -> int:
        """Bytes of all stored items."""
        return sum(info.length for info in self.index.storage_data.values())


def _read_manifest(path: Path) -> dict[str, Any] | None:
    file = path / MANIFEST
    if not file.exists():
        return None
    try:
        outer = json.loads(file.read_text(encoding="utf-8"))
        content: dict[str, Any] = outer["content"]
        if outer["crc32"] != _crc(content):
            raise ValueError("its checksum is not the one saved")
        for key, kind in (("format", int), ("index_crc32", int), ("items_crc32", dict)):
            if not isinstance(content[key], kind):
                raise TypeError(f"{key} is no {kind.__name__}")
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f"{file}: damaged: {e}") from None
    if content["format"] > _FORMAT:
        raise CheckpointError(
            f"{file}: written by a newer release (format {content['format']}); this one reads "
            f"formats up to {_FORMAT}"
        )
    return content


def _crc(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


class ArchiveReader(FileSystemReader):
    """Reads items of an archive, each checked against its checksum. Runs nothing that it reads."""

    def __init__(self, archive: Archive) -> None:
        super().__init__(archive.path)
        self.archive = archive
        self._checksums = archive.checksums

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.archive.index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, dict[int, list[ReadItem]]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            by_file.setdefault(info.relative_path, {}).setdefault(info.offset, []).append(item)
        for name, by_offset in by_file.items():
            with (self.archive.path / name).open("rb") as file:
                for offset in sorted(by_offset):
                    self._read(file, name, offset, by_offset[offset], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(
        self,
        file: io.BufferedReader,
        name: str,
        offset: int,
        items: Sequence[ReadItem],
        planner: LoadPlanner,
    ) -> None:
        what = items[0].storage_index.fqn
        length = self.storage_data[items[0].storage_index].length
        file.seek(offset)
        data = file.read(length)
        if len(data) != length:
            raise CheckpointError(f"{self.archive.path / name}: truncated in {what}")
        expected = self._checksums.get((name, offset))
        if expected is not None and zlib.crc32(data) != expected:
            raise CheckpointError(
                f"{self.archive.path / name}: damaged in {what}: its checksum is not the one saved"
            )
        if items[0].type == LoadItemType.BYTE_IO:
            for item in items:
                planner.load_bytes(item, io.BytesIO(data))
            return
        stored = load_plain(io.BytesIO(data), f"{self.archive.path / name}: {what}")
        for item in items:
            source = _narrow(stored, item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)


def _narrow(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dimension, offset, size)
    return tensor


def load_plain(data: io.BytesIO, where: str) -> Any:
    """Read a stored value: tensors, numbers, text and containers of them.

    Raises:
        CheckpointError: it is damaged, or holds anything else; nothing of it is run.
    """
    try:
        return torch.load(data, map_location="cpu", weights_only=True)
    except Exception as e:  # a damaged archive can raise nearly anything
        why = " ".join(str(e).split())
        refused = "Weights only load failed" in why
        text = "it holds more than plain data, and code is never loaded" if refused else why[:200]
        raise CheckpointError(f"{where}: {text}") from None


@dataclass(frozen=True)
class _Checked(WriteResult):
    """What was written, with its checksum on the way to the rank that writes the manifest."""

    crc32: int = 0


class ArchiveWriter(FileSystemWriter):
    """Writes a checkpoint beside the complete ones, and gives it its name when all is written.

    Args:
        folder: The job's checkpoints.
        step: Of this one.
        facts: What the manifest is to say of the job; plain JSON.
        tokenizer: Folder of tokenizer files to keep with it.
        file_bytes: A rank begins a new file once one has so much; what a file takes is in host
            memory while it is written, unless it was there before.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        step: int,
        facts: Mapping[str, Any],
        tokenizer: Path | None = None,
        file_bytes: int = 1 << 29,
    ) -> None:
        super().__init__(folder.saving(step))
        self.file_bytes = file_bytes
        self.folder = folder
        self.step = step
        self.facts = dict(facts)
        self.tokenizer = tokenizer
        self.written: tuple[int, int] = (0, 0)
        """After the end, on the first rank: bytes of all ranks, and of the one with most."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make room, and refuse before the first byte if it cannot fit. On the first rank."""
        final = self.folder.at(self.step)
        if final.exists() and not final.is_dir():
            raise CheckpointError(f"{final}: a file is in the way; nothing was written")
        # Every rank has its plan and none writes yet: what a dead job left here can go.
        for file in self.folder.saving(self.step).iterdir():
            if file.is_dir():
                remove(file)
            else:
                file.unlink()
        needed = sum(_item_bytes(item) for plan in plans for item in plan.items)
        free = shutil.disk_usage(self.folder.path).free
        if needed > free:
            raise CheckpointError(
                f"{self.folder.path}: step-{self.step} needs {needed / 2**20:,.0f} MiB, and "
                f"{free / 2**20:,.0f} MiB are free; nothing was written"
            )
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items, and read them back for their checksums."""
        try:
            results = self._write_data(planner, self._files(plan)).wait()
        except RuntimeError:
            # torch's serializer hides why a write failed.
            _probe(self.folder.saving(self.step))
            raise
        checked: list[WriteResult] = []
        by_file: dict[str, list[WriteResult]] = {}
        for result in results:
            by_file.setdefault(result.storage_data.relative_path, []).append(result)
        for name, items in by_file.items():
            with (self.folder.saving(self.step) / name).open("rb") as file:
                for item in items:
                    info = item.storage_data
                    crc = _crc_of(file, info.offset, info.length)
                    checked.append(_Checked(item.index, item.size_in_bytes, info, crc32=crc))
        done: Future[list[WriteResult]] = Future()
        done.set_result(checked)
        return done

    def _files(self, plan: SavePlan) -> queue.Queue[tuple[Path, str, list[WriteItem]]]:
        files: list[list[WriteItem]] = [[]]
        size = 0
        for item in plan.items:
            if files[-1] and size + _item_bytes(item) > self.file_bytes:
                files.append([])
                size = 0
            files[-1].append(item)
            size += _item_bytes(item)
        result: queue.Queue[tuple[Path, str, list[WriteItem]]] = queue.Queue()
        for number, items in enumerate(files):
            name = f"{plan.storage_data.prefix}{number}{DEFAULT_SUFFIX}"
            result.put((self.folder.saving(self.step) / name, name, items))
        return result

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write index and manifest and give the checkpoint its name. On the first rank alone."""
        path = self.folder.saving(self.step)
        by_rank = cast(list[list[_Checked]], results)
        files: dict[str, list[tuple[int, int]]] = {}
        for items in by_rank:
            for item in items:
                name = item.storage_data.relative_path
                files.setdefault(name, []).append((item.storage_data.offset, item.crc32))
        for name in files:
            if not (path / name).is_file():
                raise CheckpointError(
                    f"{path / name}: another rank wrote it, and it is not here; all nodes must see "
                    "one shared folder"
                )
        super().finish(metadata, results)
        if self.tokenizer is not None:
            copy_tokenizer(self.tokenizer, path / TOKENIZER)
        content = {
            **self.facts,
            "format": _FORMAT,
            "step": self.step,
            "torch": torch.__version__,
            "index_crc32": zlib.crc32((path / INDEX).read_bytes()),
            "items_crc32": files,
        }
        # As it will be read: tuples become lists.
        content = json.loads(json.dumps(content))
        (path / MANIFEST).write_text(
            json.dumps({"crc32": _crc(content), "content": content}), encoding="utf-8"
        )
        sync(path)
        self.folder.commit(self.step)
        sizes = [sum(item.size_in_bytes for item in items) for items in by_rank]
        self.written = (sum(sizes), max(sizes))


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a tokenizer, out of a folder that may hold a model's weights too."""
    target.mkdir(exist_ok=True)
    for pattern in _TOKENIZER_FILES:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, target / file.name)


def _item_bytes(item: WriteItem) -> int:
    if item.tensor_data is None or item.tensor_data.chunk is None:
        return 0
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _probe(folder: Path) -> None:
    """Raise OSError if nothing can be written any more."""
    probe = folder / ".probe"
    try:
        with probe.open("wb") as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)


def _crc_of(file: BinaryIO, offset: int, length: int) -> int:
    crc = 0
    file.seek(offset)
    # In pieces: mapping the file would count all of it as this process's memory.
    while length > 0 and (data := file.read(min(length, _READ_BYTES))):
        crc, length = zlib.crc32(data, crc), length - len(data)
    return crc
