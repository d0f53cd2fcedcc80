"""Read the index of a checkpoint, which DCP pickles, without running anything that it says.

A pickle is a program: it may name any function to be called. Here it may name the few classes that
an index consists of and nothing else; anything more is refused before it is looked up.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.metadata import Metadata

from torchtitan_dmuon.checkpoint.errors import CheckpointError

_CLASSES: dict[str, tuple[str, ...]] = {
    dcp.__name__: (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    filesystem.__name__: ("_StorageInfo",),
    "torch": ("Size",),
    # DCP stores the folder that was written, as a path of the machine that wrote it.
    "pathlib": ("PosixPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath"),
    "collections": ("OrderedDict",),
}


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.serialization" and name == "_get_layout":
            return _layout
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index holds")
        if module.startswith("pathlib"):
            return getattr(pathlib, name)
        return super().find_class(module, name)


def _layout(name: str) -> torch.layout:
    """Return `torch.strided`: the one layout that tensors of a checkpoint have."""
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"it has the layout {name}")
    return torch.strided


def read_index(data: bytes, where: object) -> Metadata:
    """Return what a `.metadata` file says.

    Args:
        data: The content of the file.
        where: The file, for messages.

    Raises:
        CheckpointError: it is damaged, or would have code run.
    """
    try:
        index = _Index(io.BytesIO(data)).load()
    except Exception as e:  # a damaged pickle can raise nearly anything
        why = " ".join(str(e).split()) or type(e).__name__
        raise CheckpointError(f"{where}: not the index of a checkpoint: {why}") from None
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise CheckpointError(f"{where}: not the index of a checkpoint")
    return index
