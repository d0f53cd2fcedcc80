"""What a plan says: the keys of `dmuon plan --json`.

The keys are stable: they may be added to, and `PLAN_VERSION` counts changes of meaning. Bytes are
bytes, times seconds, ratios plain numbers; only `memory_gib` is in GiB (2**30 bytes). "Per GPU" is
what one GPU has; `busiest` is the rank with the most, `mean` the mean over all ranks unless a
field says otherwise.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

PLAN_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The model.

    Attributes:
        name: Family.
        flavor: Size.
        parameters: Elements of all parameters, tied ones once.
        owned_elements: Elements that owners hold: matrices, and small tensors of the layers.
        matrix_elements: Elements of the matrices.
        layers: FSDP wrapping units.
    """

    name: str
    flavor: str
    parameters: int
    owned_elements: int
    matrix_elements: int
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Where the job would run.

    Attributes:
        device: Key of the device description.
        device_name: Its name.
        memory_gib: Memory of one GPU, as nvidia-smi shows it.
        nodes: Nodes.
        gpus_per_node: GPUs of each.
        rows: R of the owner mesh: replicas. 1 under FSDP.
        columns: K of the owner mesh: the ranks that a layer is gathered over.
    """

    device: str
    device_name: str
    memory_gib: float
    nodes: int
    gpus_per_node: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A quantity per rank.

    Attributes:
        busiest: Of the rank with the most.
        mean: Mean over the ranks.
    """

    busiest: float
    mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NsTime:
    """Newton-Schulz (or another matrix optimizer's) time of a step.

    Attributes:
        busiest_seconds: Of the busiest rank.
        mean_seconds: Mean over all ranks.
        bound_seconds: No assignment makes the busiest rank faster.
        busiest_over_mean: Balance.
        source: Where the time of a shape comes from.
    """

    busiest_seconds: float
    mean_seconds: float
    bound_seconds: float
    busiest_over_mean: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteBalance:
    """Bytes of the owned matrices.

    Attributes:
        heaviest_over_mean: Heaviest rank over the mean: what the byte cap limits.
        cap: The cap, as a share over the mean; None if it is off.
        over_cap: Units that took their rank over the cap.
    """

    heaviest_over_mean: float
    cap: float | None
    over_cap: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Balance over the columns of the mesh, whose cross-node links are the rails.

    Attributes:
        publish_max_over_mean: Published bytes of the heaviest rail over the mean.
        time_max_over_mean: Update time of the busiest column over the mean.
    """

    publish_max_over_mean: float
    time_max_over_mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rail:
    """What the owners of one column publish in a step. Norms and biases count as tasks of theirs.

    Attributes:
        column: Column.
        tasks: Parameters that are published: matrices, norms and biases.
        matrices: Matrices among them.
        bytes: Bytes of all tasks.
        largest_bytes: Bytes of the largest.
        seconds: Update time of the column's ranks together.
    """

    column: int
    tasks: int
    matrices: int
    bytes: int
    largest_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that one GPU sends in a step, without protocol overhead, on average.

    Attributes:
        gather_inside: Parameters of layers, inside the node.
        gather_across: The same between nodes.
        reduce_inside: Gradients of layers, inside the node.
        reduce_across: The same between nodes.
        publish_inside: New weights to the leaders of rows on the same node.
        publish_across: New weights to the leaders of other nodes.
        rest_inside: Parameters and gradients outside the layers (embeddings, output head).
        rest_across: The same between nodes.
        optimizer_inside: What the optimizer step itself sends (mode gather).
        optimizer_across: The same between nodes.
    """

    gather_inside: float = 0.0
    gather_across: float = 0.0
    reduce_inside: float = 0.0
    reduce_across: float = 0.0
    publish_inside: float = 0.0
    publish_across: float = 0.0
    rest_inside: float = 0.0
    rest_across: float = 0.0
    optimizer_inside: float = 0.0
    optimizer_across: float = 0.0
    inside: float = field(init=False)
    across: float = field(init=False)

    def __post_init__(self) -> None:
        inside = self.gather_inside + self.reduce_inside + self.publish_inside
        inside += self.rest_inside + self.optimizer_inside
        across = self.gather_across + self.reduce_across + self.publish_across
        across += self.rest_across + self.optimizer_across
        object.__setattr__(self, "inside", inside)
        object.__setattr__(self, "across", across)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """GiB of the heaviest GPU at the moment when most is in use. The parts add up to `peak`.

    Attributes:
        parameters: Parameters that computation reads: gathered layers, embeddings, output head.
        masters: FP32 parameters that the optimizer updates: owned ones, and shards.
        momentum: Optimizer state: momentum of owned matrices, AdamW's moments.
        leader_copies: Copies in the compute dtype that a node gathers from.
        gradients: Gradients that autograd makes, in flight, and reduced.
        pool: Resident in the symmetric pool beyond what the parts above count (line D).
        activations: Saved for the backward pass, the loss included.
        runtime: CUDA context, library workspaces, communication buffers, fragmentation.
        peak: Sum of the above.
    """

    parameters: float
    masters: float
    momentum: float
    leader_copies: float
    gradients: float
    pool: float
    activations: float
    runtime: float
    peak: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlace:
    """A unit and its owner.

    Attributes:
        name: First matrix (or parameter) of the unit.
        matrices: Matrices in it.
        parameters: Norms and biases that ride along.
        elements: Elements of all of it.
        seconds: Update time.
        rank: Owner.
        row: Its row.
        column: Its column.
    """

    name: str
    matrices: int
    parameters: int
    elements: int
    seconds: float
    rank: int
    row: int
    column: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlace:
    """A layer and the owners of its units, in the layer's order."""

    name: str
    units: tuple[UnitPlace, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """What a rank owns.

    Attributes:
        rank: Rank.
        units: Units.
        matrices: Matrices.
        seconds: Update time of a step.
        elements: Elements of its matrices.
        state_bytes: Optimizer state.
    """

    rank: int
    units: int
    matrices: int
    seconds: float
    elements: int
    state_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A job's cost, known before it runs.

    Attributes:
        config: The config file.
        line: Line of the paper's comparison (A to D, torch), or "".
        mode: Who holds the matrices: fsdp, gather, owner.
        communication: What moves owned matrices: c10d or operators.
        sharding: fsdp_z2, fsdp_z3, hsdp_z2, hsdp_z3 or ddp.
        algorithm: Matrix optimizer; "adamw" in mode fsdp.
        tokens_per_gpu: Tokens of one micro-batch on one GPU.
        seq_len: Sequence length.
        recompute: Mode of activation checkpointing.
        assignment: How owners are chosen: lpt, round_robin or elements; none without owners.
        matrices: Matrices that the matrix optimizer updates; 0 with AdamW alone.
        units: Assignment units that hold matrices; 0 without owners, and so are ratios 1.
        groups: What is gathered and reduced together: layers.
        units_per_layer: Units with matrices of the layer that has the most.
        owners: Ranks that own something.
        worst_layer_root_ratio: Bytes of a layer's heaviest owner over those of the layer's largest
            unit, in the worst layer; 1 if no owner has two units of a layer.
        worst_layer: That layer's name.
        state_bytes: Optimizer state per rank, in bytes.
        master_bytes: FP32 parameters per rank that the optimizer updates.
        owner_window_bytes: Reduced gradients of what a rank owns, in the reduce dtype; the mean is
            over the ranks that own something.
        leader_copy_bytes: Copies that a node gathers from, per GPU.
        gradient_bytes: Reduced gradients per rank at the end of the backward pass.
        pool_bytes: Symmetric pool of every rank (line D): gathered layers, gradients in flight,
            owner window, leader copies; contexts of the network not included.
        fits: Whether the peak is within the GPU's memory.
        headroom_gib: Memory less peak.
        advice: What to change if it does not fit, or is close.
        assumptions: What the figures rest on, a sentence each.
        model, cluster, ns_time, bytes, columns, rails, traffic, memory_gib: See their classes.
            Traffic is per GPU and step.
        layers: Owners of every unit.
        ranks: Loads of every rank.
    """

    version: int = PLAN_VERSION
    config: str
    line: str
    mode: str
    communication: str
    sharding: str
    algorithm: str
    tokens_per_gpu: int
    seq_len: int
    recompute: str
    assignment: str
    model: ModelFacts
    cluster: Cluster
    matrices: int
    units: int
    groups: int
    units_per_layer: int
    owners: int
    ns_time: NsTime
    bytes: ByteBalance
    worst_layer_root_ratio: float
    worst_layer: str
    columns: Columns
    rails: tuple[Rail, ...]
    state_bytes: Ratio
    master_bytes: Ratio
    owner_window_bytes: Ratio
    leader_copy_bytes: Ratio
    gradient_bytes: Ratio
    pool_bytes: int
    traffic: Traffic
    memory_gib: Memory
    fits: bool
    headroom_gib: float
    advice: tuple[str, ...]
    assumptions: tuple[str, ...]
    layers: tuple[LayerPlace, ...]
    ranks: tuple[RankPlace, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as dicts, lists, numbers and strings."""
        return asdict(self)

    def to_json(self) -> str:
        """Return the plan as JSON with two spaces of indentation."""
        return json.dumps(self.as_dict(), indent=2)
