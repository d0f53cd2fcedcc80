"""From a checkpoint to a Hugging Face folder, tensor by tensor."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from torchtitan_dmuon.checkpoint.archive import Archive, ArchiveReader, copy_tokenizer
from torchtitan_dmuon.checkpoint.errors import CheckpointError
from torchtitan_dmuon.checkpoint.hf_folder import whole_folder
from torchtitan_dmuon.checkpoint.hf_model import HFModel
from torchtitan_dmuon.checkpoint.planners import LoadPlanner

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"

_HEADER_BYTES = 200
"""Of a safetensors file, about this much for each tensor."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of the export: its name here, names and shapes there, and its dtype."""

    name: str
    hf: Mapping[str, torch.Size]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return sum(shape.numel() for shape in self.hf.values()) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of the export and what is in it."""

    file: str
    entries: Sequence[Entry]

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)


Progress = Callable[[Shard, int, int], None]
"""Is told, when a shard is written: the shard, bytes written so far, bytes in all."""


def plan(
    archive: Archive, model: HFModel, dtype: torch.dtype | None, max_bytes: int
) -> list[Shard]:
    """Decide which tensor goes into which file.

    Args:
        archive: The checkpoint.
        model: Which it is of.
        dtype: Of all tensors; None keeps what is stored.
        max_bytes: Size of a file, unless a single tensor (or stack of experts) is larger.

    Raises:
        CheckpointError: the checkpoint is another model's.
    """
    check_model(archive, model)
    stored: dict[str, Any] = archive.index.state_dict_metadata
    groups: list[list[Entry]] = []
    size = 0
    for name, parts in model.hf.items():
        entry = Entry(name, parts, dtype or stored[name].properties.dtype)
        if not groups or size + entry.bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.bytes
    if len(groups) == 1:
        return [Shard("model.safetensors", groups[0])]
    return [
        Shard(f"model-{number:05}-of-{len(groups):05}.safetensors", group)
        for number, group in enumerate(groups, 1)
    ]


def check_model(archive: Archive, model: HFModel) -> None:
    """Raise CheckpointError unless a checkpoint has the tensors of a model, with their shapes."""
    index = archive.index
    tops = {name.split(".")[0] for name in model.tensors}
    others = {key.split(".")[0] for key in index.state_dict_metadata} - tops
    planner = LoadPlanner(archive, others, lambda _: None)
    planner.set_up_planner(dict(model.tensors), index, True)
    planner.create_local_plan()


def export(
    archive: Archive,
    model: HFModel,
    shards: Sequence[Shard],
    to: Path,
    tokenizer: Path | None,
    progress: Progress,
) -> None:
    """Write a model as a folder that transformers loads.

    In memory are the tensors of one shard, and for a moment two more copies of the one being read.

    Args:
        archive: The checkpoint.
        model: Which it is of.
        shards: What `plan` returned.
        to: Folder; must not exist, or be empty.
        tokenizer: Folder of the tokenizer's files.
        progress: Called after each shard.

    Raises:
        CheckpointError: damaged, or cannot be written; nothing is left of it.
    """
    total = sum(shard.bytes for shard in shards)
    headers = _HEADER_BYTES * sum(len(parts) for parts in model.hf.values())
    read = _reader(archive)
    with whole_folder(to, total + headers) as folder:
        if tokenizer is not None:
            copy_tokenizer(tokenizer, folder)
        _json(folder / CONFIG, _config(model, shards, folder))
        done = 0
        for shard in shards:
            tensors: dict[str, torch.Tensor] = {}
            for entry in shard.entries:
                tensor = read(entry, model.tensors[entry.name].shape)
                tensors |= model.to_hf(entry.name, tensor)
                del tensor
            _write(tensors, folder / shard.file, to)
            done += shard.bytes
            progress(shard, done, total)
            del tensors
        if len(shards) > 1:
            weight_map = {n: shard.file for shard in shards for e in shard.entries for n in e.hf}
            _json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _reader(archive: Archive) -> Callable[[Entry, Sequence[int]], torch.Tensor]:
    reader = ArchiveReader(archive)
    reader.set_up_storage_reader(archive.index, True)

    def read(entry: Entry, shape: Sequence[int]) -> torch.Tensor:
        tensor = torch.empty(tuple(shape), dtype=entry.dtype)
        planner = DefaultLoadPlanner()
        planner.set_up_planner({entry.name: tensor}, archive.index, True)
        try:
            reader.read_data(planner.create_local_plan(), planner)
        except OSError as e:
            raise CheckpointError(f"{e.filename}: cannot be read: {e.strerror}") from e
        if entry.dtype == torch.float16 and tensor.numel() and tensor.isinf().any():
            raise CheckpointError(
                f"{entry.name}: has values beyond the range of float16; use --dtype bfloat16"
            )
        return tensor

    return read


def _write(tensors: dict[str, torch.Tensor], file: Path, to: Path) -> None:
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as e:
        why = " ".join(str(e).split())
        raise CheckpointError(f"{to / file.name}: cannot be written: {why}") from e
    shutil.copymode(file.with_name(CONFIG), file)  # the library makes it for its user alone
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _config(model: HFModel, shards: Sequence[Shard], tokenizer: Path) -> dict[str, Any]:
    sizes: dict[torch.dtype, int] = {}
    for shard in shards:
        for entry in shard.entries:
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.bytes
    largest = max(sizes, key=sizes.__getitem__)
    return {
        **model.hf_config,
        "torch_dtype": str(largest).removeprefix("torch."),
        **token_ids(tokenizer),
    }


def token_ids(folder: Path) -> dict[str, int | None]:
    """Return the ids of the begin and end tokens of a tokenizer; None where it has none."""
    ids: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None}
    try:
        text = (folder / "tokenizer_config.json").read_text(encoding="utf-8")
        settings = json.loads(text)
        vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # tokenizers raises Exception itself; without these files nothing is known
        return ids
    for key in ids:
        token = settings.get(key.removesuffix("_id"))
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            ids[key] = vocabulary.token_to_id(content)
    return ids


def rebuilt_by_transformers(model: HFModel, tokenizer: Path) -> bool:
    """Whether transformers 5's AutoTokenizer splits words otherwise than a tokenizer says.

    For a model of type qwen2 or qwen2_moe it takes vocabulary and merges from `tokenizer.json`, and
    Qwen2's own way of splitting text, whatever the file and its class say.
    PreTrainedTokenizerFast takes all from the file.
    """
    if model.hf_config["model_type"] not in ("qwen2", "qwen2_moe"):
        return False
    try:
        content = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
        first = (content["pre_tokenizer"].get("pretokenizers") or [{}])[0]
    except (OSError, ValueError, KeyError, AttributeError):
        return False
    pattern = first.get("pattern", {}).get("Regex", "")
    # Llama 3's is the same but for \p{N}{1,3}.
    return not pattern.startswith("(?i:'s|'t|") or r"\p{N}{" in pattern
