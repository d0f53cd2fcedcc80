"""The lines of the paper's comparison: one key that switches mode, optimizer, communication."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.config.schema import JobConfig
from torchtitan_dmuon.config.toml_io import Source

Name = Literal["A", "B", "C", "D", "torch"]


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """What a line stands for (paper section 7.1).

    Attributes:
        mode: Of the layers.
        optimizer: Its name.
        communication: What owners communicate over.
        also: Other values of `communication` that may stand beside the line.
    """

    mode: Literal["fsdp", "gather", "owner"]
    optimizer: Literal["AdamW", "DMuon", "Muon"]
    communication: Literal["c10d", "operators"] = "c10d"
    also: tuple[Literal["auto"], ...] = ()


LINES: dict[Name, Line] = {
    "A": Line("fsdp", "AdamW"),
    "B": Line("gather", "DMuon"),
    "C": Line("owner", "DMuon"),
    "D": Line("owner", "DMuon", "operators", also=("auto",)),
    "torch": Line("fsdp", "Muon"),
}


def resolve(config: JobConfig, sources: Sequence[Source]) -> JobConfig:
    """Return the job with what `line` and `mode` imply written out; again, it changes nothing.

    Line A takes the learning rate, betas, eps and weight decay of `adamw_*`. Modes owner and
    gather take `spmd_backend` partial_dtensor unless it was set: owned layers are plain tensors, so
    without tensor parallelism there is nothing that spmd types could say.

    Args:
        config: The merged job.
        sources: Where its values come from, the winning one first.

    Raises:
        ConfigError: a mode, optimizer or communication that was set at the same place as the line,
            or at one that wins over it, is another than the line's.
    """
    p, o = config.parallelism, config.optimizer
    if config.line:
        line = LINES[config.line]
        _contradiction(config, sources, "parallelism.mode", p.mode, line.mode)
        _contradiction(config, sources, "optimizer.name", o.name, line.optimizer)
        communication = p.communication if p.communication in line.also else line.communication
        _contradiction(config, sources, "parallelism.communication", p.communication, communication)
        p = dataclasses.replace(p, mode=line.mode, communication=communication)
        o = dataclasses.replace(o, name=line.optimizer)
    if config.line == "A":
        o = dataclasses.replace(
            o,
            lr=o.adamw_lr,
            betas=o.adamw_betas,
            eps=o.adamw_eps,
            weight_decay=o.adamw_weight_decay,
        )
    if p.mode != "fsdp" and _place(sources, "parallelism.spmd_backend") == len(sources):
        p = dataclasses.replace(p, spmd_backend="partial_dtensor")
    return dataclasses.replace(config, parallelism=p, optimizer=o)


def _place(sources: Sequence[Source], key: str) -> int:
    """Index of the source that sets a key; the number of sources if none does."""
    found = (i for i, source in enumerate(sources) if source.line(key) is not None)
    return next(found, len(sources))


def _contradiction(
    config: JobConfig, sources: Sequence[Source], key: str, value: str, implied: str
) -> None:
    place = _place(sources, key)
    if value != implied and place <= _place(sources, "line") and place < len(sources):
        hint = ", or give --line D" if value == "operators" else ""
        raise ConfigError(
            f'{sources[place].at(key)}: "{value}" contradicts line = "{config.line}", which means '
            f'"{implied}"; leave out one of the two{hint}'
        )
