"""From a Hugging Face folder to a checkpoint that holds a model alone, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.metadata import MetadataIndex

from torchtitan_dmuon.checkpoint.archive import ArchiveWriter
from torchtitan_dmuon.checkpoint.errors import CheckpointError
from torchtitan_dmuon.checkpoint.folder import CheckpointFolder
from torchtitan_dmuon.checkpoint.held import HeldTensor
from torchtitan_dmuon.checkpoint.hf_export import CONFIG, INDEX
from torchtitan_dmuon.checkpoint.hf_model import EMBEDDING, HEAD, HFModel
from torchtitan_dmuon.checkpoint.planners import some
from torchtitan_dmuon.checkpoint.transfer import write
from torchtitan_dmuon.models.hf_config import hf_differences

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# A model is never in memory as a whole, but what a file of the checkpoint takes is.
_FILE_BYTES = 1 << 24
# Old files store the RoPE frequencies, which are computed here.
_COMPUTED = "self_attn.rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a safetensors file, of which only the header has been read."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            CheckpointError: the file cannot be read.
        """
        # Opened for each tensor: what is mapped is let go with it.
        try:
            with safe_open(self.file, framework="pt") as content:
                tensor: torch.Tensor = content.get_tensor(self.name)
                return tensor
        except (SafetensorError, OSError, RuntimeError) as e:
            raise CheckpointError(f"{self.file}: {self.name}: {_line(e)}") from e


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Return the tensors of a Hugging Face folder by name.

    Raises:
        CheckpointError: not such a folder, pickled weights, a file that is missing or damaged.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "no such folder"
        raise CheckpointError(f"{folder}: {what}; expected a folder with safetensors files")
    placed = _weight_map(folder)
    found: dict[str, Stored] = {}
    for file in sorted({*placed.values()}) or sorted(p.name for p in folder.glob("*.safetensors")):
        found |= _header(folder / file)
    if not found:
        pickled = sorted(p.name for pattern in _PICKLED for p in folder.glob(pattern))
        if pickled:
            raise CheckpointError(
                f"{folder}: holds pickled weights ({pickled[0]}), which can run code and are never "
                "loaded; expected safetensors files: save the model with transformers' "
                "save_pretrained"
            )
        raise CheckpointError(f"{folder}: holds no safetensors files")
    lost = [f"{name} in {file}" for name, file in placed.items() if name not in found]
    if lost:
        raise CheckpointError(f"{folder / INDEX}: names what is not there: {some(lost)}")
    return found


def _weight_map(folder: Path) -> dict[str, str]:
    content = _read_json(folder / INDEX)
    if content is None:
        return {}
    placed = content.get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(v, str) for v in placed.values()):
        raise CheckpointError(f"{folder / INDEX}: damaged: it has no weight_map")
    for file in set(placed.values()):
        if Path(file).name != file:
            raise CheckpointError(f"{folder / INDEX}: it points out of its folder, at {file}")
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder / file}: missing; {INDEX} names it")
    return placed


def _header(file: Path) -> dict[str, Stored]:
    result = {}
    try:
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118
                view = content.get_slice(name)
                dtype = view.get_dtype()
                if dtype not in _DTYPES:
                    known = ", ".join(_DTYPES)
                    raise CheckpointError(
                        f"{file}: {name} is {dtype}; expected one of {known}: quantized models "
                        "cannot be imported"
                    )
                result[name] = Stored(file, name, tuple(view.get_shape()), _DTYPES[dtype])
    except (SafetensorError, OSError, RuntimeError) as e:
        raise CheckpointError(f"{file}: truncated or damaged: {_line(e)}") from e
    return result


def _read_json(file: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not a table")
        return content
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{file}: damaged: {_line(e)}") from e


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def assign(folder: Path, model: HFModel, found: Mapping[str, Stored]) -> dict[str, list[Stored]]:
    """Return for each tensor of a model the stored ones that it is made from.

    Raises:
        CheckpointError: the folder holds another model.
    """
    config = _read_json(folder / CONFIG)
    if config is not None and (differing := hf_differences(model.hf_config, config)):
        raise CheckpointError(f"{folder / CONFIG}: not {model.title}: {'; '.join(differing)}")
    sources = {name: list(parts) for name, parts in model.hf.items()}
    if model.tied:
        _tie(folder, model, found, sources)
    used = dict.fromkeys(hf_name for parts in sources.values() for hf_name in parts)
    missing = [hf_name for hf_name in used if hf_name not in found]
    extra = [n for n in found if n not in {*used, HEAD} and not n.endswith(_COMPUTED)]
    if not model.tied and HEAD in found and HEAD not in used:
        extra.append(HEAD)
    shapes = [
        f"{hf_name} is {found[hf_name].shape} there and {tuple(shape)} here"
        for parts in model.hf.values()
        for hf_name, shape in parts.items()
        if hf_name in found and found[hf_name].shape != tuple(shape)
    ]
    problems = [f"it lacks {some(missing)}"] * bool(missing)
    problems += [f"it has {some(extra)}, which that has not"] * bool(extra)
    problems += [some(shapes)] * bool(shapes)
    if problems:
        raise CheckpointError(f"{folder}: not {model.title}: {'; '.join(problems)}")
    assigned = {name: [found[n] for n in parts] for name, parts in sources.items()}
    for name, parts in assigned.items():
        if len(dtypes := {str(p.dtype).removeprefix("torch.") for p in parts}) > 1:
            raise CheckpointError(
                f"{folder}: the parts of {name} are {' and '.join(sorted(dtypes))}; expected one "
                "dtype"
            )
    return assigned


def _tie(
    folder: Path, model: HFModel, found: Mapping[str, Stored], sources: dict[str, list[str]]
) -> None:
    """Have embedding and head come from one tensor; files hold either of them, or both."""
    (embedding,) = sources[EMBEDDING]
    if embedding in found and HEAD in found:
        one, other = found[embedding], found[HEAD]
        if one.shape != other.shape or not torch.equal(one.read(), other.read()):
            raise CheckpointError(
                f"{folder}: not {model.title}: {HEAD} is not the embedding, to which it is tied "
                "here"
            )
    if embedding not in found and HEAD in found:
        sources[EMBEDDING] = [HEAD]
    sources[HEAD] = sources[EMBEDDING]


class _Pending(HeldTensor):
    """A tensor that is read when it is written."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, read: Callable[[], torch.Tensor]):
        box = torch.empty(shape, dtype=dtype, device="meta")
        super().__init__(shape, dtype, [((0,) * len(shape), box)])
        self.read = read

    def at(self, index: MetadataIndex) -> torch.Tensor:
        """Return the whole tensor, which is its one box."""
        return self.read()


Progress = Callable[[str, int, int], None]
"""Is told, when a tensor has been read: its name, bytes so far, bytes in all."""


def import_model(folder: Path, model: HFModel, to: Path, progress: Progress) -> tuple[Path, int]:
    """Write a Hugging Face model as the checkpoint `to/step-0`.

    In memory is about one tensor, and the parts of a stack of experts. dtypes stay those of the
    files.

    Args:
        folder: With safetensors files.
        model: Which it is.
        to: Folder of checkpoints; without step-0.
        progress: Called after each tensor.

    Returns:
        The checkpoint, and the bytes of its tensors.

    Raises:
        CheckpointError: another model, damaged, or it cannot be written; nothing is left of it.
    """
    checkpoints = CheckpointFolder(to)
    refuse_existing_step(checkpoints)
    sources = assign(folder, model, stored_tensors(folder))
    total = sum(model.tensors[n].numel() * s[0].dtype.itemsize for n, s in sources.items())
    done = 0

    def read(name: str, parts: Sequence[Stored]) -> torch.Tensor:
        nonlocal done
        tensor = model.from_hf(name, [part.read() for part in parts])
        done += tensor.numel() * tensor.element_size()
        progress(name, done, total)
        return tensor

    states = {
        name: _Pending(model.tensors[name].shape, s[0].dtype, partial(read, name, s))
        for name, s in sources.items()
    }
    facts = {
        "model": {
            "name": model.name,
            "flavor": model.flavor,
            "vocab_size": model.hf_config["vocab_size"],
        },
    }
    tokenizer = folder if (folder / "tokenizer.json").is_file() else None
    lock = checkpoints.lock()
    try:
        checkpoints.recover()
        write(states, ArchiveWriter(checkpoints, 0, facts, tokenizer, file_bytes=_FILE_BYTES))
    finally:
        if lock is not None:
            lock.close()
    return checkpoints.at(0), total


def refuse_existing_step(checkpoints: CheckpointFolder) -> None:
    """Raise CheckpointError if an import would overwrite something or not be what is loaded."""
    complete = checkpoints.complete()
    if complete:
        raise CheckpointError(
            f"{checkpoints.path}: has step-{complete[-1]} already; nothing is overwritten: name "
            "another folder"
        )
