"""Where a job is to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.config.schema import JobConfig
from torchtitan_dmuon.ownership import ExpertUnits, OwnerMesh
from torchtitan_dmuon.planner.devices import DEVICES, Device

Assigned = Literal["lpt", "round_robin", "elements"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where a job is to run, and how owners are chosen where that is to differ from the job.

    Attributes:
        nodes: Nodes.
        gpus_per_node: GPUs of a node.
        device: What they are.
        assignment: How owners are chosen; None: as the job says.
        byte_cap: Excess over the mean bytes; None: no cap.
        expert_units: What becomes of a stack's matrices.
        column_balance: Whether columns come first. If not, ranks are tried column by column.
        layer_spreading: Whether a layer's units go to different ranks.
        cost: Cost table: name, path, "model"; empty: the job's, or the device's if it measures.
    """

    nodes: int
    gpus_per_node: int
    device: Device = DEVICES["h100-80g"]
    assignment: Assigned | None = None
    byte_cap: float | None = 0.1
    expert_units: ExpertUnits = "each"
    column_balance: bool = True
    layer_spreading: bool = True
    cost: str = ""


def mesh_of(config: JobConfig, ranks: int) -> OwnerMesh:
    """Return the mesh that a job has on a number of ranks.

    One replica stays one (FSDP); else the shard degree stays, and the replicas follow.

    Raises:
        ConfigError: the ranks do not divide.
    """
    p = config.parallelism
    replicate, shard = p.data_parallel_replicate_degree, p.data_parallel_shard_degree
    others = p.tensor_parallel_degree * p.pipeline_parallel_degree * p.context_parallel_degree
    if others * p.expert_parallel_degree > 1:
        raise ConfigError(
            "parallelism: a plan knows data parallelism only; expected tensor, pipeline, context "
            "and expert degrees of 1"
        )
    if config.training.dtype != "float32":
        raise ConfigError(
            "training.dtype: a plan knows masters of float32 only, got "
            f"{config.training.dtype}; what layers compute in is training.mixed_precision_param"
        )
    if replicate == 1:
        return OwnerMesh(1, ranks)
    if shard == -1:
        if replicate < 1 or ranks % replicate:
            raise ConfigError(f"parallelism: {ranks} ranks are not a multiple of {replicate}")
        shard = ranks // replicate
    if ranks % shard:
        raise ConfigError(
            f"parallelism.data_parallel_shard_degree: {shard} does not divide {ranks} ranks"
        )
    return OwnerMesh(ranks // shard, shard)
