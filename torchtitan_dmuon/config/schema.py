"""What a job config may say: torchtitan's own dataclasses, section by section, plus a few of ours.

The defaults are those of torchtitan 0.3.0 except where a `default_factory` below changes one and
says why. The docstring below a field is its text in `--help`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
import tyro
from torchtitan.components.optimizer import LRSchedulersContainer, ParamGroupConfig
from torchtitan.config import (
    CommConfig,
    CompileConfig,
    DebugConfig,
    OverrideConfig,
    ParallelismConfig,
    TrainingConfig,
)

from torchtitan_dmuon.checkpoint.manager import CheckpointManager
from torchtitan_dmuon.metrics import ProgressMetrics
from torchtitan_dmuon.profiler import Profiler


def torch_knows_spmd_types() -> bool:
    """Whether FSDP2 of the installed torch can shard spmd_types parameters (2.14 and newer)."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 14)


def default_spmd_backend() -> Literal["partial_dtensor", "spmd_types"]:
    """torchtitan's default where torch supports it, else the one that works."""
    return "spmd_types" if torch_knows_spmd_types() else "partial_dtensor"


@dataclass(kw_only=True, slots=True)
class Model:
    name: str = "qwen2_5"
    """Model family: qwen2_5, qwen_moe, or one of torchtitan's own decoders: llama3, qwen3."""

    flavor: str = "debug"
    """Size of the model, e.g. debug, 1.5B, 7B. A wrong value lists what the family has."""

    attn_backend: Literal["auto", "sdpa", "flex", "flex_flash", "varlen"] = "auto"
    """Inner attention. auto: flex on GPUs, sdpa on CPUs (the only one that trains there)."""


@dataclass(kw_only=True, slots=True)
class Training(TrainingConfig):
    # CUDA graphs are off unless asked for: capture forbids work that owner and gather hook into.
    disable_cuda_graphs: bool = True
    """Whether to run without CUDA graphs; modes owner and gather need it."""

    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Precision in which gradients travel and are summed; bfloat16 halves the bytes."""


@dataclass(kw_only=True, slots=True)
class Parallelism(ParallelismConfig):
    data_parallel_replicate_degree: int = 1
    """
    Copies of the weights: the rows of HSDP, the ranks of DDP. -1: all that is left, so that a job
    with a shard degree of 8 runs on any number of nodes of 8 GPUs. Only one degree can be -1.
    """

    data_parallel_shard_degree: int = -1
    """Ranks that share one copy of the weights. -1: all that is left; 1: none, which is DDP."""

    spmd_backend: Literal["partial_dtensor", "spmd_types"] = field(
        default_factory=default_spmd_backend
    )
    """
    How parallel tensors are represented. spmd_types (torchtitan's default) needs torch 2.14 or
    newer; with an older torch the default is partial_dtensor.
    """

    mode: Literal["fsdp", "gather", "owner"] = "fsdp"
    """
    Who holds and updates the weight matrices. fsdp: torchtitan's own FSDP2, HSDP or DDP, every
    rank updates its shard. owner: every matrix has one owner rank, which alone orthogonalizes and
    updates it. gather: shards, and every rank orthogonalizes whole matrices before each step.
    owner and gather go with optimizer.name DMuon.
    """

    communication: Literal["c10d", "operators", "auto"] = "c10d"
    """
    What moves owned matrices: c10d (collectives of NCCL or gloo), or operators (line D: our own
    kernels on a symmetric pool; on CPUs all ranks must be on one machine, on GPUs see
    docs/hardware.md). auto: operators if every rank can, else c10d, and the log says why.
    """

    small_matrix_numel: int = 5_000_000
    """Matrices with fewer elements share one owner per layer, as one unit; 0: each has its own."""

    byte_cap: float = 0.1
    """A rank owns at most (1 + byte_cap) times the mean bytes; the layout may force an excess."""

    owner_cost: str = "measured"
    """
    What owners are balanced by: measured (an update timed once per shape at start), model (a
    formula: the same owners on every machine), or a table of times: the name of one that comes with
    the package (h100: fitted to published figures, not measured) or the path of a .json file that
    dmuon costs wrote.
    """

    owner_assignment: Literal["balanced", "round_robin", "elements"] = "balanced"
    """
    balanced by cost. For comparison: round_robin (unit by unit) and elements (by number of
    elements).
    """

    prefetch_depth: int = 1
    """Layers that are gathered ahead of the one that computes; 0: none."""

    replica_check_interval: int = 0
    """Steps between two checks that replicas are bit for bit the same; 0: never."""


@dataclass(kw_only=True, slots=True)
class Optimizer:
    name: Literal["AdamW", "Adam", "DMuon", "Muon"] = "AdamW"
    """
    AdamW and Adam update every parameter that no entry of param_groups claims. DMuon: a matrix
    optimizer on owned matrices (modes owner and gather), AdamW for all else. Muon: torch.optim.Muon
    on the matrices inside the layers, AdamW for all else (mode fsdp; for comparison).
    """

    algorithm: str = "muon"
    """
    DMuon: the matrix optimizer: muon, normuon, soap, shampoo, or module:Class of your own.
    """

    algorithm_options: dict[str, Any] = field(default_factory=dict)
    """
    DMuon: options of another algorithm than muon, by their names; see docs/optimizers.md. A table,
    [optimizer.algorithm_options], or on the command line in TOML: '{precondition_frequency = 5}'.
    """

    lr: float = 8e-4
    """Learning rate at the top of the schedule; of the matrices for DMuon and Muon."""

    weight_decay: float = 0.1
    """
    Decoupled weight decay (AdamW; matrices of DMuon and Muon), L2 penalty (Adam).
    """

    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW, Adam: decay rates of the first and second moment."""

    eps: float = 1e-8
    """AdamW, Adam: added to the denominator."""

    momentum: float = 0.95
    """DMuon, Muon: decay rate of the momentum."""

    nesterov: bool = True
    """DMuon, Muon: whether the momentum looks one step ahead."""

    ns_steps: int = 5
    """DMuon, Muon: Newton-Schulz iterations, 1 to 99."""

    ns_coefficients: (
        Literal["polar_express", "quintic"]
        | tuple[float, float, float]
        | list[tuple[float, float, float]]
    ) = "polar_express"
    """
    DMuon: coefficients of Newton-Schulz: polar_express (five steps, each with its own), quintic
    (3.4445, -4.7750, 2.0315, as torch's Muon), three numbers, or three for each step. Muon knows
    three numbers only, and takes quintic otherwise.
    """

    ns_dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    """
    DMuon: precision of Newton-Schulz. auto: float16 on GPUs, float32 on CPUs, most of which are
    slow at the others. torch's Muon knows bfloat16 only.
    """

    ns_method: Literal["auto", "gram", "standard"] = "auto"
    """
    DMuon: how Newton-Schulz iterates: gram on the small Gram matrix, standard on the matrix itself,
    auto whatever needs fewer operations (gram unless the matrix is square or nearly so).
    """

    ns_restarts: list[int] | None = None
    """
    DMuon: steps before which gram forms the Gram matrix anew. none: 2; with bfloat16 2 and 4.
    """

    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
    """
    DMuon, Muon: factor on the learning rate of an m x n matrix. original: sqrt(max(1, m / n)).
    match_rms_adamw: 0.2 sqrt(max(m, n)), updates as large as AdamW's, so its learning rates fit.
    """

    adamw_lr: float = 3e-4
    """DMuon, Muon: learning rate of everything that is not a matrix of a layer."""

    adamw_betas: tuple[float, float] = (0.9, 0.95)
    """DMuon, Muon: decay rates of the moments of everything else."""

    adamw_eps: float = 1e-8
    """DMuon, Muon: added to the denominator for everything else."""

    adamw_weight_decay: float = 0.0
    """DMuon, Muon: decoupled weight decay of everything else."""

    per_head: bool = False
    """
    DMuon: whether each attention head's rows of Q, K and V are a matrix of their own, with their
    own owner and update.
    """

    qk_clip: float = 0.0
    """
    DMuon: largest attention logit (QK-clip): where a head's exceeds it, its query and key weights
    are scaled down after the step. Kimi K2 took 100. 0: off.
    """

    publish: Literal["async", "sync"] = "async"
    """
    DMuon: whether new weights travel to the other nodes during the next forward pass (async) or
    before the step ends (sync). Both give the same bits.
    """

    nonfinite: Literal["skip", "error"] = "skip"
    """DMuon: what to do with a step whose gradients have an inf or a nan; both name parameters."""

    implementation: Literal["fused", "foreach", "for-loop", "fused_opt_states_bf16"] = "fused"
    """How the update is computed; fused_opt_states_bf16 keeps the moments in bfloat16 (CUDA)."""

    param_groups: Annotated[list[ParamGroupConfig], tyro.conf.Suppress] = field(
        default_factory=list
    )
    """
    Config file only: `[[optimizer.param_groups]]` entries with `pattern` (regex on parameter
    names), `optimizer_name` and `optimizer_kwargs`. The first match wins. For DMuon the name is
    DMuon, and what an entry leaves out keeps the section's value.
    """


@dataclass(kw_only=True, slots=True)
class Data:
    dataset: str = "python_stdlib"
    """
    python_stdlib (source files of this Python, on every machine), random_tokens (for throughput),
    fineweb_edu (streamed), local_files for what dataset_path names, or such a path itself.
    """

    dataset_path: str | None = None
    """File, folder or glob of text, JSONL or Parquet; for a named set, its local copy or mirror."""

    text_key: str = "text"
    """Field of a JSONL or Parquet record that holds the text."""

    infinite: bool = True
    """Start over, in a new order, when the data is used up."""

    cache_folder: str = ""
    """Where tokenised text and trained tokenizers are kept. Empty: the user's cache folder."""


@dataclass(kw_only=True, slots=True)
class TrainData(Data):
    seed: int = 42
    """Fixes the order of the samples, for every number of ranks."""

    shuffle: bool = True
    """Whether samples are drawn in random order."""


@dataclass(kw_only=True, slots=True)
class Tokenizer:
    vocab_size: int = 2048
    """
    Size of the byte-level BPE that is trained on the data at first use. Only when hf_assets_path
    is empty; otherwise the tokenizer is read from there.
    """


@dataclass(kw_only=True, slots=True)
class Loss:
    name: Literal["chunked_cross_entropy", "cross_entropy"] = "chunked_cross_entropy"
    """chunked_cross_entropy never holds the logits of the whole sequence at once."""

    num_chunks: int = 8
    """Pieces that chunked_cross_entropy splits the sequence into."""


@dataclass(kw_only=True, slots=True)
class ActivationCheckpoint:
    mode: Literal["none", "selective", "full", "memory_budget"] = "selective"
    """What is recomputed in the backward pass; memory_budget needs compile.enable."""

    preserve_rng_state: bool = True
    """Stash and restore the random state, for the same bits as without recomputation."""

    determinism_check: str = "default"
    """See torch.utils.checkpoint."""

    debug: bool = False
    """Capture debug information of torch.utils.checkpoint (slow)."""

    force_recompute_mm_shapes_by_fqns: list[str] = field(
        default_factory=lambda: ["moe.router.gate"]
    )
    """selective: always recompute products with the weight shapes of these modules."""

    memory_budget: float = 0.5
    """memory_budget: 0 recomputes everything, 1 nothing that the compiler would keep."""

    visualize_memory_budget_pareto: bool = False
    """memory_budget: write the memory over run time curve into the dump folder."""


@dataclass(kw_only=True, slots=True)
class Validation:
    enable: bool = False
    """Whether to compute the loss on held-out data."""

    freq: int = 10
    """Steps between two validations."""

    steps: int = 10
    """Batches per validation, the same on every rank."""

    # Named on purpose: a default would be the training data of some job.
    data: Data = field(default_factory=lambda: Data(dataset=""))
    """The held-out data; dataset must be set."""


@dataclass(kw_only=True, slots=True)
class JobConfig:
    """A training job. Sections and keys are torchtitan's own."""

    line: Literal["", "A", "B", "C", "D", "torch"] = ""
    """
    Switches a job with DMuon's settings between lines that are compared, whatever the file says
    about mode, optimizer and communication. A: FSDP2 with AdamW (the adamw_ settings). B: mode
    gather, DMuon. C: mode owner, DMuon. D: as C with communication operators. torch: FSDP2 with
    torch.optim.Muon. Empty: mode, name and communication decide.
    """

    dump_folder: str = "./outputs"
    """Folder for logs, TensorBoard events and checkpoints."""

    hf_assets_path: str = ""
    """
    Folder with the tokenizer (and weights) of a Hugging Face model. Empty: a tokenizer is trained
    on the data.
    """

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """cuda and cpu insist; auto takes GPUs if there is one for each rank of a node, else CPUs."""

    max_restarts: int = 0
    """How often a failed job is started again, by its launcher, from its last checkpoint."""

    model: Model = field(default_factory=Model)
    """Which model to train."""

    training: Training = field(default_factory=Training)
    """Batch, sequence and precision."""

    parallelism: Parallelism = field(default_factory=Parallelism)
    """How the job is spread over ranks."""

    optimizer: Optimizer = field(default_factory=Optimizer)
    """
    The optimizer. In a config file `[[optimizer.param_groups]]` entries (pattern, optimizer_name,
    optimizer_kwargs) set another one for the parameters whose names match.
    """

    lr_scheduler: LRSchedulersContainer.Config = field(default_factory=LRSchedulersContainer.Config)
    """Learning-rate schedule, shared in shape by all parameter groups."""

    dataloader: TrainData = field(default_factory=TrainData)
    """Training data."""

    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    """Tokenizer trained on the data."""

    loss: Loss = field(default_factory=Loss)
    """Loss function."""

    metrics: ProgressMetrics.Config = field(
        default_factory=lambda: ProgressMetrics.Config(enable_tensorboard=True)
    )
    """Progress lines and TensorBoard (on by default)."""

    # The last checkpoint is a full one by default, so that a finished job can be continued.
    checkpoint: CheckpointManager.Config = field(
        default_factory=lambda: CheckpointManager.Config(last_save_model_only=False)
    )
    """Saving and resuming."""

    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    """Recomputation in the backward pass."""

    compile: CompileConfig = field(default_factory=CompileConfig)
    """torch.compile."""

    validator: Validation = field(default_factory=Validation)
    """Loss on held-out data."""

    comm: CommConfig = field(default_factory=CommConfig)
    """Time-outs and traces of collectives."""

    profiler: Profiler.Config = field(default_factory=Profiler.Config)
    """
    Traces of steps, one file per rank: enable_profiling records one step in profile_freq, and dmuon
    timeline draws them. Memory snapshots.
    """

    # Seeded by default: the same command gives the same numbers.
    debug: DebugConfig = field(default_factory=lambda: DebugConfig(seed=42))
    """Seeds, determinism and checks."""

    override: OverrideConfig = field(default_factory=OverrideConfig)
    """torchtitan overrides: replacements of components by name."""
