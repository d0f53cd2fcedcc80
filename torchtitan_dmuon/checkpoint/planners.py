"""What DCP writes and reads of a state: held tensors, and whether a checkpoint fits at all."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

# Private, but the one rule for how DCP names the values of nested dicts.
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from torchtitan_dmuon.checkpoint.archive import Archive, load_plain
from torchtitan_dmuon.checkpoint.beside import Pace
from torchtitan_dmuon.checkpoint.errors import CheckpointError
from torchtitan_dmuon.checkpoint.held import HeldTensor

OPTIMIZER, RANDOM = "optimizer", "rng"
DATALOADER = "dataloader"
BY_RANK = (DATALOADER, RANDOM)
"""Parts whose entries may depend on the number of ranks."""

OPTIONAL = (RANDOM,)
"""Parts of a job's state that a checkpoint may lack."""

_STATE = f"{OPTIMIZER}.state."
_GROUPS = f"{OPTIMIZER}.param_groups."
_SHOWN = 4


class SavePlanner(DefaultSavePlanner):
    """DCP's planner, which also saves `HeldTensor`s.

    Args:
        pace: Of a save beside the training; None: as fast as can be.
    """

    def __init__(self, pace: Pace | None = None) -> None:
        super().__init__(flatten_sharded_tensors=False)
        self.pace = pace

    def create_local_plan(self) -> SavePlan:
        self._rest()
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self._rest()
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        self._rest()
        return super().resolve_data(write_item)

    def _rest(self) -> None:
        if self.pace is not None:
            self.pace.rest()

    def lookup_object(self, index: MetadataIndex) -> Any:
        held = self.state_dict[index.fqn]
        return held.at(index) if isinstance(held, HeldTensor) else super().lookup_object(index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Serialize a value; refuse one that could never be loaded."""
        data = super().transform_object(write_item, object)
        if isinstance(data, io.BytesIO) and not _is_plain(object):
            name = write_item.index.fqn
            load_plain(io.BytesIO(data.getvalue()), f"{name} ({type(object).__name__})")
        return data


class LoadPlanner(DefaultLoadPlanner):
    """DCP's planner, which also loads `HeldTensor`s, and first checks that the checkpoint fits.

    What a checkpoint holds and what is wanted must be the same, except:

    - An optimizer's settings are the job's; those in the checkpoint are not read.
    - A parameter whose state is all that of another rule (it was updated by AdamW and now is by
      Muon, or the reverse), or has entries that the rule with its present options does not keep,
      starts with fresh state: zero.
    - Parts that are not wanted at all (`optimizer`, `dataloader`, ...) may be there, those in
      `OPTIONAL` may be missing, and those in `BY_RANK` may have more entries.

    Args:
        archive: What is loaded from.
        parts: First components of names that are no model's (`optimizer`, `lr_scheduler`, ...).
        report: Is told the names of parameters whose optimizer state starts fresh.
    """

    def __init__(
        self,
        archive: Archive,
        parts: Iterable[str],
        report: Callable[[Sequence[str]], None],
    ) -> None:
        super().__init__(flatten_sharded_tensors=False)
        self.archive = archive
        self.parts = {*parts, *OPTIONAL, OPTIMIZER}
        self.report = report

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.original_state_dict = state_dict
        self.state_dict, self.mappings = flatten_state_dict(state_dict)
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        wanted = {k: v for k, v in self.state_dict.items() if not k.startswith(_GROUPS)}
        fresh = fresh_state(wanted, stored)
        wanted = {k: v for k, v in wanted.items() if k not in fresh}
        self._check(wanted, stored)
        for key in fresh:
            zero(self.state_dict[key])
        self.report(sorted({_parameter(key) for key in fresh}))
        return create_default_local_load_plan(wanted, self.metadata, strict=False)

    def _check(self, wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
        missing = [k for k in wanted if k not in stored and k.split(".")[0] not in OPTIONAL]
        # Of a part that is loaded nothing may get lost; of one that is not, all does.
        loaded = {key.split(".")[0] for key in wanted} | set(self.original_state_dict)
        left = (self.parts - loaded) | {OPTIMIZER, *BY_RANK}
        extra = [k for k in stored if k not in wanted and k.split(".")[0] not in left]
        shapes = [
            f"{key} is {tuple(stored[key].size)} there and {tuple(value.size())} here"
            for key, value in wanted.items()
            if isinstance(value, torch.Tensor | HeldTensor)
            and isinstance(stored.get(key), TensorStorageMetadata)
            and stored[key].size != value.size()
        ]
        if not (missing or extra or shapes):
            return
        problems = []
        if missing:
            problems.append(f"it lacks {some(missing)}")
        if extra:
            problems.append(f"it has {some(extra)}, which this job has not")
        if shapes:
            problems.append(some(shapes, "; "))
        raise CheckpointError(f"{self.archive.path}: {'; '.join(problems)}{self._hint(missing)}")

    def _hint(self, missing: Sequence[str]) -> str:
        tops = {key.split(".")[0] for key in missing}
        stored = {key.split(".")[0] for key in self.archive.index.state_dict_metadata}
        model = (self.archive.manifest or {}).get("model")
        if tops and tops <= self.parts and not stored & self.parts:
            return (
                "; it holds a model alone: start from it with checkpoint.initial_load_path, which "
                "loads just that (checkpoint.initial_load_model_only)"
            )
        if tops == {DATALOADER}:
            return (
                "; its data were read by another number of ranks, or another kind of loader: to "
                "start the data from their beginning, set checkpoint.exclude_from_loading = "
                '["dataloader"]'
            )
        if tops == {OPTIMIZER}:
            return (
                "; to start all of it fresh, leave it out (checkpoint.exclude_from_loading, or "
                'exclude of load_checkpoint: "optimizer")'
            )
        return f"; it is of the model {model['name']} {model['flavor']}" if model else ""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        plain = load_plain(value, f"{self.archive.path}: {name}")
        set_element(self.original_state_dict, self.mappings[name], plain)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        held = self.state_dict[index.fqn]
        return held.at(index) if isinstance(held, HeldTensor) else super().lookup_tensor(index)


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, bytes)


def fresh_state(wanted: Iterable[str], stored: Iterable[str]) -> set[str]:
    """Return the wanted entries of parameters whose stored state is that of another rule."""
    here, there = _by_parameter(wanted), _by_parameter(stored)
    fresh = set()
    for parameter, keys in here.items():
        other = there.get(parameter, set())
        # Also one with other options, which kept more: what is left means something else then.
        if other and (not other & keys or other > keys):
            fresh |= keys
    return fresh


def _by_parameter(keys: Iterable[str]) -> dict[str, set[str]]:
    result: dict[str, set[str]] = {}
    for key in keys:
        if key.startswith(_STATE):
            result.setdefault(_parameter(key), set()).add(key)
    return result


def _parameter(key: str) -> str:
    # State of one matrix of several is under the parameter's name with the matrix's index behind.
    return re.sub(r"\[\d+\]$", "", key.removeprefix(_STATE).rpartition(".")[0])


def zero(value: torch.Tensor | HeldTensor) -> None:
    """Set what this rank holds of a tensor to zero."""
    if isinstance(value, HeldTensor):
        for _, tensor in value.boxes:
            tensor.zero_()
    elif isinstance(value, DTensor):
        value.to_local().zero_()
    else:
        value.zero_()


def some(names: Sequence[str], separator: str = ", ") -> str:
    """Return the first few names for a message, and how many more there are."""
    shown = separator.join(sorted(names)[:_SHOWN])
    more = len(names) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
