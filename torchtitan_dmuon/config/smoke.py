"""`--smoke`: the values that let any job run for a few steps on four CPU ranks.

They stand between the config files and the command line. What decides the code path stays as the
files say: line, mode, optimizer, resharding, recomputation, precision, loss, compilation.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torchtitan.components.tokenizer import HuggingFaceTokenizer

from torchtitan_dmuon.config.data_source import locate
from torchtitan_dmuon.config.schema import Data, JobConfig
from torchtitan_dmuon.config.toml_io import Source
from torchtitan_dmuon.data import RANDOM_TOKENS, dataset_kind, open_source
from torchtitan_dmuon.models.registry import get_model_spec, toy_flavor

RANKS = 4
STEPS = 5
_SEQ_LEN = 64
_BATCH = 2
_OTHERS = ("context", "tensor", "pipeline", "expert")


@dataclasses.dataclass(frozen=True, slots=True)
class Smoke(Source):
    """`--smoke` as a source of values; `text` lists the keys that it sets."""

    def at(self, key: str) -> str:
        return f"--smoke: {key}"

    def line(self, key: str) -> int | None:
        return 1 if key in self.text.split() else None


def smoke_table(config: JobConfig, name: str) -> tuple[dict[str, Any], Smoke]:
    """Return what `--smoke` changes, as a table for `toml_io.merge`, and its source.

    Wrong names of models and data sets stay, for the checks to say where they are.

    Args:
        config: The job as its files say.
        name: Name of the job, for its own dump folder.
    """
    wanted: dict[str, Any] = {
        "dump_folder": f"./outputs/smoke/{name}",
        "device": "cpu",
        # A run that starts at the first step each time, whatever an earlier one has left.
        "max_restarts": 0,
        "checkpoint.enable": False,
        "checkpoint.initial_load_path": None,
        "checkpoint.initial_load_in_hf": False,
        "metrics.log_freq": 1,
        **_mesh(config),
        **_training(config),
        **_what_cpus_can(config),
    }
    wanted |= _model(config)
    wanted |= _data(config, wanted)
    changed = {key: value for key, value in wanted.items() if _get(config, key) != value}
    table: dict[str, Any] = {}
    for key, value in changed.items():
        *sections, last = key.split(".")
        inner = table
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = "none" if value is None else value
    return table, Smoke("--smoke", " ".join(changed))


def describe(before: JobConfig, after: JobConfig, source: Smoke, command_line: Source) -> list[str]:
    """Say in a few lines what `--smoke` changed, without what the command line then set.

    Args:
        before: The job as its files say.
        after: The job that will run.
        source: What `smoke_table` returned.
        command_line: The source that wins over it.
    """
    changes: dict[str, list[str]] = {}
    for key in source.text.split():
        if command_line.line(key) is None:
            section, _, last = key.rpartition(".")
            old, new = (_show(_get(config, key)) for config in (before, after))
            changes.setdefault(section, []).append(f"{last} {new} (was {old})")
    width = max(map(len, changes), default=0)
    return [
        f"smoke: {section or 'job':<{max(width, 3)}}  {', '.join(items)}"
        for section, items in changes.items()
    ]


def _show(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else f"{value}" or '""'


def _get(config: JobConfig, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _mesh(config: JobConfig) -> dict[str, int]:
    """Fold the mesh: rows stay rows, and DDP stays DDP. All ranks are data-parallel ones.

    Degrees with which the job cannot run anywhere stay, for the checks to say so.
    """
    p = config.parallelism
    both = (p.data_parallel_replicate_degree, p.data_parallel_shard_degree)
    others = [getattr(p, f"{name}_parallel_degree") for name in _OTHERS]
    if min(both) < -1 or 0 in both or both == (-1, -1) or min(others) < 1:
        return {}
    if p.data_parallel_shard_degree == 1:
        mesh = (RANKS, 1)
    elif p.data_parallel_replicate_degree == 1:
        mesh = (1, RANKS)
    else:
        mesh = (2, RANKS // 2)
    folded = dict.fromkeys(_OTHERS, 1)
    return {
        "parallelism.data_parallel_replicate_degree": mesh[0],
        "parallelism.data_parallel_shard_degree": mesh[1],
        **{f"parallelism.{name}_parallel_degree": one for name, one in folded.items()},
    }


def _training(config: JobConfig) -> dict[str, Any]:
    t, s = config.training, config.lr_scheduler
    batch = min(t.local_batch_size, _BATCH)
    accumulates = t.global_batch_size > 0
    # A chunked loss wants a sequence that its chunks divide.
    pieces = config.loss.num_chunks if config.loss.name == "chunked_cross_entropy" else 1
    pieces = max(1, pieces)  # what cannot be is for the checks to say
    validation = {}
    if config.validator.enable:
        validation = {"validator.freq": STEPS, "validator.steps": 1}
    return {
        "training.steps": STEPS,
        "training.seq_len": min(t.seq_len, -(-_SEQ_LEN // pieces) * pieces),
        "training.local_batch_size": batch,
        # A job that sets it accumulates gradients, over two batches here.
        "training.global_batch_size": 2 * batch * RANKS if accumulates else -1,
        # With a long warm-up nothing would move in these few steps.
        "lr_scheduler.warmup_steps": min(s.warmup_steps, 1),
        "lr_scheduler.total_steps": None,
        **validation,
    }


def _what_cpus_can(config: JobConfig) -> dict[str, Any]:
    attention, implementation = config.model.attn_backend, config.optimizer.implementation
    return {
        "training.disable_cuda_graphs": True,
        "training.enable_cpu_offload": False,
        "model.attn_backend": attention if attention in ("auto", "sdpa") else "auto",
        "optimizer.implementation": (
            "fused" if implementation == "fused_opt_states_bf16" else implementation
        ),
    }


def _model(config: JobConfig) -> dict[str, Any]:
    """Put the flavor's toy in its place, with what depends on the sizes of matrices."""
    name, flavor, p = config.model.name, config.model.flavor, config.parallelism
    try:
        toy = toy_flavor(name, flavor)
    except ValueError:
        return {}
    if toy == flavor:
        return {}
    full, small = (get_model_spec(name, f, attn_backend="sdpa").model.dim for f in (flavor, toy))
    return {
        "model.flavor": toy,
        # So that the same matrices are small, and share an owner.
        "parallelism.small_matrix_numel": round(p.small_matrix_numel * (small / full) ** 2),
        # A table of times has the shapes of the full model.
        "parallelism.owner_cost": (
            p.owner_cost if p.owner_cost in ("measured", "model") else "model"
        ),
    }


def _data(config: JobConfig, wanted: dict[str, Any]) -> dict[str, Any]:
    """Put random tokens in the place of data that is not here, and of what it needs."""
    name, flavor = config.model.name, wanted.get("model.flavor", config.model.flavor)
    try:
        vocabulary = get_model_spec(name, flavor, attn_backend="sdpa").model.vocab_size
    except ValueError:
        return {}
    sections: dict[str, Data] = {"dataloader": config.dataloader}
    if config.validator.enable and config.validator.data.dataset:
        sections["validator.data"] = config.validator.data
    changed: dict[str, Any] = {
        "tokenizer.vocab_size": min(config.tokenizer.vocab_size, vocabulary),
        "hf_assets_path": (
            config.hf_assets_path if _tokenizer_fits(config.hf_assets_path, vocabulary) else ""
        ),
    }
    # Random tokens and text do not go together: both have the same tokenizer.
    if not all(map(_is_here, sections.values())):
        for section in sections:
            changed |= {f"{section}.dataset": RANDOM_TOKENS, f"{section}.dataset_path": None}
    return changed


def _is_here(data: Data) -> bool:
    """Whether the data are files of this machine. What has an unknown name stays, to be refused."""
    name, path = locate(data)
    try:
        if dataset_kind(name) == "streamed":
            return False
    except ValueError:
        return True
    if name == RANDOM_TOKENS:
        return True
    try:
        open_source(name, path, data.text_key)
    except ValueError:
        return False
    return True


def _tokenizer_fits(folder: str, vocabulary: int) -> bool:
    """Whether there is a tokenizer whose every token the toy has. One that is broken stays."""
    if not folder or not Path(folder).is_dir():
        return False
    try:
        size: int = HuggingFaceTokenizer(tokenizer_path=folder).get_vocab_size()
    # The tokenizers library raises bare Exception for a file that it cannot read.
    except Exception:
        return True
    return size <= vocabulary
