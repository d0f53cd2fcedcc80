"""Layouts of the data-parallel ranks, by name, for any number of ranks and nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchtitan_dmuon.config.errors import ConfigError

NAMES = ("DDP", "FSDP-Z2", "FSDP-Z3", "HSDP-Z2", "HSDP-Z3")
DEFAULT_RANKS = 4

FIXED_KEYS = {
    "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree",
    "parallelism.fsdp_reshard_after_forward",
    "parallelism.spmd_backend",
    "dataloader.dataset",
    "training.steps",
}
"""Keys that a benchmark sets itself; giving one on the command line is an error."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the data-parallel ranks are arranged, and whether the backward pass gathers again."""

    name: str
    replicate: int
    shard: int
    reshard: Literal["never", "always"]

    @property
    def key(self) -> str:
        """The name as files in train_configs/ spell it, e.g. hsdp_z3."""
        return self.name.lower().replace("-", "_")


def find_layouts(
    data_parallel: int, nodes: int, names: Sequence[str] = NAMES, rows: int | None = None
) -> list[Layout]:
    """Return the named layouts for this many data-parallel ranks on this many nodes.

    Args:
        data_parallel: The ranks.
        nodes: Nodes of the world.
        names: Of the layouts.
        rows: Replicas of HSDP; None: one per node, on one node 2.

    Raises:
        ConfigError: too few ranks, or HSDP is named and they do not make rows of at least 2.
    """
    rows = rows or (nodes if nodes > 1 else 2)
    columns, rest = divmod(data_parallel, rows)
    if data_parallel < 2:
        raise ConfigError("1 data-parallel rank: layouts differ from 2 ranks on; try --ranks 4")
    if (rest or columns < 2) and any(name.startswith("HSDP") for name in names):
        raise ConfigError(
            f"{data_parallel} data-parallel ranks: HSDP needs {rows} rows of equal length, at "
            f"least 2 each, so a multiple of {rows} from {2 * rows} on; try --ranks, or leave "
            "HSDP out"
        )
    degrees = {"DDP": (data_parallel, 1), "FSDP": (1, data_parallel), "HSDP": (rows, columns)}
    found = []
    for name in names:
        kind, _, zero = name.partition("-")
        found.append(Layout(name, *degrees[kind], "always" if zero == "Z3" else "never"))
    return found


def find_ranks(
    asked: int | None, wanted_device: str, world_size: int | None
) -> tuple[int, Literal["cuda", "cpu"]]:
    """Return the number of ranks and their device.

    Args:
        asked: What `--ranks` says.
        wanted_device: The job's `device`.
        world_size: Ranks that a launcher has started, or None.

    Raises:
        ConfigError: the three do not fit together or this machine.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted_device == "cpu":
        gpus = 0
    if world_size is not None:  # started by torchrun
        if asked not in (None, world_size):
            raise ConfigError(f"--ranks {asked}: torchrun has started {world_size}")
        return world_size, "cuda" if gpus else "cpu"
    ranks = asked or max(gpus, DEFAULT_RANKS)
    if wanted_device == "cuda" and ranks > gpus:
        raise ConfigError(f"device: {ranks} ranks need as many GPUs, found {gpus}; try --ranks")
    return ranks, "cuda" if gpus >= ranks else "cpu"
