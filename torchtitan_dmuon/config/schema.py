"""What a job config may say: torchtitan's own dataclasses, section by section, plus a few of ours.

The defaults are those of torchtitan 0.3.0 except where a `default_factory` below changes one and
says why. The docstring below a field is its text in `--help`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
import tyro
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, ParamGroupConfig
from torchtitan.config import (
    CommConfig,
    CompileConfig,
    DebugConfig,
    OverrideConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.tools.profiler import Profiler

from torchtitan_dmuon.metrics import ProgressMetrics


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
    """Model family: qwen2_5, or one of torchtitan's own decoders: llama3, qwen3."""

    flavor: str = "debug"
    """Size of the model, e.g. debug, 1.5B, 7B. A wrong value lists what the family has."""

    attn_backend: Literal["auto", "sdpa", "flex", "flex_flash", "varlen"] = "auto"
    """Inner attention. auto: flex on GPUs, sdpa on CPUs (the only one that trains there)."""


@dataclass(kw_only=True, slots=True)
class Parallelism(ParallelismConfig):
    spmd_backend: Literal["partial_dtensor", "spmd_types"] = field(
        default_factory=default_spmd_backend
    )
    """
    How parallel tensors are represented. spmd_types (torchtitan's default) needs torch 2.14 or
    newer; with an older torch the default is partial_dtensor.
    """

    mode: Literal["fsdp"] = "fsdp"
    """
    Who holds and updates the weight matrices. fsdp: torchtitan's own FSDP2, HSDP or DDP, every
    rank updates its shard.
    """


@dataclass(kw_only=True, slots=True)
class Optimizer:
    name: Literal["AdamW", "Adam"] = "AdamW"
    """Optimizer of every parameter that no entry of param_groups claims."""

    lr: float = 8e-4
    """Learning rate at the top of the schedule."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment."""

    eps: float = 1e-8
    """Added to the denominator."""

    weight_decay: float = 0.1
    """Decoupled weight decay (AdamW), L2 penalty (Adam)."""

    implementation: Literal["fused", "foreach", "for-loop", "fused_opt_states_bf16"] = "fused"
    """How the update is computed; fused_opt_states_bf16 keeps the moments in bfloat16 (CUDA)."""

    param_groups: Annotated[list[ParamGroupConfig], tyro.conf.Suppress] = field(
        default_factory=list
    )
    """
    Config file only: `[[optimizer.param_groups]]` entries with `pattern` (regex on parameter
    names), `optimizer_name` and `optimizer_kwargs`. The first match wins.
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

    dump_folder: str = "./outputs"
    """Folder for logs, TensorBoard events and checkpoints."""

    hf_assets_path: str = ""
    """
    Folder with the tokenizer (and weights) of a Hugging Face model. Empty: a tokenizer is trained
    on the data.
    """

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """cuda and cpu insist; auto takes GPUs if there is one for each rank of a node, else CPUs."""

    model: Model = field(default_factory=Model)
    """Which model to train."""

    # CUDA graphs are off unless asked for: capture forbids work that later modes hook into.
    training: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(disable_cuda_graphs=True)
    )
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
    """Kernel traces and memory snapshots."""

    # Seeded by default: the same command gives the same numbers.
    debug: DebugConfig = field(default_factory=lambda: DebugConfig(seed=42))
    """Seeds, determinism and checks."""

    override: OverrideConfig = field(default_factory=OverrideConfig)
    """torchtitan overrides: replacements of components by name."""
