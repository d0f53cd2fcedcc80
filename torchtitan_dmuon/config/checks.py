"""What a job must satisfy beyond the type of each key, checked before any process group exists."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtitan.components.tokenizer import HuggingFaceTokenizer

from torchtitan_dmuon.config.checkpoint_checks import check_checkpoint
from torchtitan_dmuon.config.data_source import locate
from torchtitan_dmuon.config.errors import ConfigError, nearest
from torchtitan_dmuon.config.manager import Job
from torchtitan_dmuon.config.optimizer_checks import (
    check_communication,
    check_experts,
    check_mode,
    check_optimizer,
    check_owner_cost,
    check_qk_clip,
)
from torchtitan_dmuon.config.schema import Data, torch_knows_spmd_types
from torchtitan_dmuon.data import RANDOM_TOKENS, dataset_kind, open_source
from torchtitan_dmuon.models.registry import get_model_spec

_FACTORS = {
    "data_parallel_replicate_degree": "replicate",
    "data_parallel_shard_degree": "shard",
    "context_parallel_degree": "context",
    "tensor_parallel_degree": "tensor",
    "pipeline_parallel_degree": "pipeline",
}

_MAY_BE_OPEN = ("data_parallel_replicate_degree", "data_parallel_shard_degree")
"""Degrees that can be -1, all that is left; one of them at a time."""

_AT_LEAST_ONE = (
    "training.local_batch_size",
    "training.seq_len",
    "training.steps",
    "training.gc_freq",
    "metrics.log_freq",
    "tokenizer.vocab_size",
    "loss.num_chunks",
    "validator.freq",
    "validator.steps",
    "comm.init_timeout_seconds",
    "comm.train_timeout_seconds",
    "profiler.profile_freq",
    "profiler.profiler_active",
    "parallelism.expert_parallel_degree",
)

_RANGES = (
    ("lr_scheduler.warmup_steps", 0, 2**40),
    ("lr_scheduler.total_steps", 1, 2**40),
    ("lr_scheduler.decay_ratio", 0, 1),
    ("lr_scheduler.min_lr_factor", 0, 1),
    ("activation_checkpoint.memory_budget", 0, 1),
    ("profiler.profiler_warmup", 0, 2**20),
    ("debug.seed", 0, 2**63 - 1),
    # Accepted by torchtitan, not tried with this package.
    ("parallelism.pipeline_parallel_degree", 1, 1),
    ("parallelism.small_matrix_numel", 0, 2**62),
    ("parallelism.prefetch_depth", 0, 2**20),
    ("parallelism.replica_check_interval", 0, 2**40),
    ("max_restarts", 0, 2**20),
)
"""Keys with a smallest and a largest value; unset ones are not checked."""


def _get(job: Job, key: str) -> Any:
    value: Any = job.config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def degrees(job: Job) -> int | None:
    """Return the number of ranks that the degrees multiply to, or None if one is left open (-1).

    Raises:
        ConfigError: a degree that is not a positive number (or -1 for one of the data-parallel
            degrees).
    """
    product, open_degrees = 1, []
    for name in _FACTORS:
        key = f"parallelism.{name}"
        value = int(_get(job, key))
        if value == -1 and name in _MAY_BE_OPEN:
            open_degrees.append(key)
        elif value < 1:
            more = ", or -1 for all that is left" if name in _MAY_BE_OPEN else ""
            raise ConfigError(f"{job.at(key)}: expected at least 1{more}, got {value}")
        else:
            product *= value
    if len(open_degrees) > 1:
        raise ConfigError(
            f"{job.at(open_degrees[0])}: only one degree can be -1, all that is left, and "
            f"{open_degrees[1]} is too; expected a number, e.g. the number of nodes"
        )
    return None if open_degrees else product


def with_degrees(job: Job, world_size: int) -> Job:
    """Return the job with an open replicate degree (-1) filled in; torchtitan knows no such thing.

    An open shard degree stays: torchtitan fills it in itself. One that the ranks do not fit stays
    too, for `check` to say so.

    Args:
        job: The resolved job.
        world_size: Ranks of the whole job.

    Raises:
        ConfigError: the degrees are wrong.
    """
    p = job.config.parallelism
    if degrees(job) is not None or p.data_parallel_replicate_degree != -1:
        return job
    left, rest = divmod(world_size, p.data_parallel_shard_degree * model_parallel(job))
    if rest:
        return job
    p = dataclasses.replace(p, data_parallel_replicate_degree=left)
    return dataclasses.replace(job, config=dataclasses.replace(job.config, parallelism=p))


def model_parallel(job: Job) -> int:
    """Return the number of ranks that work on the same samples."""
    p = job.config.parallelism
    return int(p.context_parallel_degree * p.tensor_parallel_degree * p.pipeline_parallel_degree)


def _check_world(job: Job, world_size: int) -> int:
    """Check that the degrees fit the world. Returns the number of data-parallel ranks."""
    fixed = degrees(job)
    p = job.config.parallelism
    shown = " x ".join(f"{getattr(p, name)} {label}" for name, label in _FACTORS.items())
    if fixed is None:
        # The open one is -1, so the product of both has the sign to drop.
        least = -p.data_parallel_replicate_degree * p.data_parallel_shard_degree
        least *= model_parallel(job)
        if world_size % least:
            raise ConfigError(
                f"{job.at('parallelism')}: {world_size} ranks are not a multiple of {least}, "
                f"the product of the given degrees ({shown})"
            )
    elif fixed != world_size:
        raise ConfigError(
            f"{job.at('parallelism')}: the degrees ({shown}) need {fixed} ranks, but the job has "
            f"{world_size}; set NGPU={fixed} or change a degree"
        )
    return world_size // model_parallel(job)


def _check_numbers(job: Job) -> None:
    for key in _AT_LEAST_ONE:
        if _get(job, key) < 1:
            raise ConfigError(f"{job.at(key)}: expected at least 1, got {_get(job, key)}")
    for key in ("parallelism.byte_cap", "training.max_norm"):
        if not 0 <= _get(job, key) < float("inf"):
            raise ConfigError(f"{job.at(key)}: expected a number >= 0, got {_get(job, key)}")
    for key, low, high in _RANGES:
        number = _get(job, key)
        if number is not None and not low <= number <= high:
            raise ConfigError(f"{job.at(key)}: expected {low} to {high}, got {number}")
    profiler = job.config.profiler
    least = profiler.profiler_warmup + profiler.profiler_active
    if profiler.enable_profiling and profiler.profile_freq < least:
        raise ConfigError(
            f"{job.at('profiler.profile_freq')}: expected at least {least} (profiler_warmup + "
            f"profiler_active), got {profiler.profile_freq}"
        )


def _check_batch(job: Job, data_parallel: int) -> None:
    training = job.config.training
    per_pass = training.local_batch_size * data_parallel
    total = training.global_batch_size
    if total != -1 and (total < 1 or total % per_pass):
        raise ConfigError(
            f"{job.at('training.global_batch_size')}: expected a multiple of local_batch_size x "
            f"data-parallel ranks = {training.local_batch_size} x {data_parallel} = {per_pass}, "
            f"or -1, got {total}"
        )


_CPU_VALUES: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("training.disable_cuda_graphs", (True,), "there are no CUDA graphs"),
    ("training.enable_cpu_offload", (False,), "there is nothing to offload from"),
    (
        "optimizer.implementation",
        ("fused", "foreach", "for-loop"),
        "bfloat16 optimizer states have no kernel",
    ),
)


def _check_device(job: Job, device: str) -> None:
    wanted, backend = job.config.device, job.config.model.attn_backend
    if wanted != "auto" and wanted != device:
        raise ConfigError(
            f'{job.at("device")}: "{wanted}" is asked for, but these ranks run on {device}; '
            "run_train.sh chooses the device, plain torchrun takes GPUs unless "
            "CUDA_VISIBLE_DEVICES is empty"
        )
    uses_sdpa = backend == "sdpa" or (backend == "auto" and device == "cpu")
    if uses_sdpa and job.config.parallelism.context_parallel_degree > 1:
        raise ConfigError(
            f"{job.at('parallelism.context_parallel_degree')}: the sdpa attention backend (the "
            "one for CPUs) holds whole sequences; expected 1"
        )
    if device != "cpu":
        return
    if backend not in ("auto", "sdpa"):
        raise ConfigError(
            f'{job.at("model.attn_backend")}: "{backend}" does not train on a CPU; expected "sdpa" '
            'or "auto"'
        )
    for key, expected, why in _CPU_VALUES:
        if _get(job, key) not in expected:
            choices = " or ".join(str(e).lower() for e in expected)
            raise ConfigError(f"{job.at(key)}: {why} on a CPU; expected {choices}")


def _check_model(job: Job) -> int:
    """Check model and sequence length. Returns the size of the model's vocabulary."""
    config = job.config
    try:
        spec = get_model_spec(config.model.name, config.model.flavor, attn_backend="sdpa")
    except ValueError as e:
        key = "model.flavor" if "flavor" in str(e) else "model.name"
        raise ConfigError(f"{job.at(key)}: {e}") from e
    longest = spec.model.max_seq_len
    if config.training.seq_len > longest:
        raise ConfigError(
            f"{job.at('training.seq_len')}: {config.training.seq_len} is more than the {longest} "
            f"that {config.model.name} {config.model.flavor} supports"
        )
    if config.parallelism.spmd_backend == "spmd_types" and not torch_knows_spmd_types():
        raise ConfigError(
            f"{job.at('parallelism.spmd_backend')}: spmd_types needs torch 2.14 or newer; expected "
            '"partial_dtensor" with this torch'
        )
    return int(spec.model.vocab_size)


def _check_tokenizer(job: Job, model_vocabulary: int) -> None:
    """Check that no token id is outside the model's embedding."""
    path = job.config.hf_assets_path
    if not path:
        key, size = "tokenizer.vocab_size", job.config.tokenizer.vocab_size
    else:
        key = "hf_assets_path"
        try:
            size = HuggingFaceTokenizer(tokenizer_path=path).get_vocab_size()
        # The tokenizers library raises bare Exception for a file that it cannot read.
        except Exception as e:
            text = " ".join(str(e).split())
            raise ConfigError(f"{job.at(key)}: no tokenizer can be read there: {text}") from e
    if size > model_vocabulary:
        raise ConfigError(
            f"{job.at(key)}: a tokenizer of {size} tokens is more than the {model_vocabulary} "
            f"of the model {job.config.model.name} {job.config.model.flavor}"
        )


def _check_names(job: Job) -> None:
    """Check names that torchtitan looks up only when it uses them."""
    for key, names in _NAMES:
        value = _get(job, key)
        for name in value if isinstance(value, list) else [value]:
            if name not in names:
                raise ConfigError(
                    f"{job.at(key)}: '{name}' is not one of {', '.join(names)}"
                    f"{nearest(name, names)}"
                )
    for entry in job.config.override.imports:
        target = entry if isinstance(entry, str) else entry[0]
        try:
            importlib.import_module(target.rpartition(".")[0])
        except (ImportError, ValueError) as e:
            raise ConfigError(f"{job.at('override.imports')}: {target}: {e}") from e


_NAMES = (
    ("compile.components", ("model", "loss")),
    ("activation_checkpoint.determinism_check", ("default", "none")),
    ("comm.mode", ("default", "torchcomms")),
)


def _check_shapes(job: Job) -> None:
    """Check that a sequence splits evenly where it is split."""
    config = job.config
    p, seq_len = config.parallelism, config.training.seq_len
    pieces = p.tensor_parallel_degree if p.enable_sequence_parallel else 1
    pieces *= 2 * p.context_parallel_degree if p.context_parallel_degree > 1 else 1
    if config.loss.name == "chunked_cross_entropy":
        local = seq_len // p.context_parallel_degree
        if local % config.loss.num_chunks:
            raise ConfigError(
                f"{job.at('loss.num_chunks')}: {config.loss.num_chunks} chunks do not divide a "
                f'sequence of {local}; choose another number, or loss.name = "cross_entropy"'
            )
    if seq_len % pieces:
        raise ConfigError(
            f"{job.at('training.seq_len')}: {seq_len} is not a multiple of {pieces}, which the "
            "tensor and context degrees need"
        )


def _paths(job: Job) -> Iterator[tuple[str, str]]:
    config = job.config
    if config.hf_assets_path:
        yield "hf_assets_path", config.hf_assets_path
    if config.checkpoint.initial_load_path and "://" not in config.checkpoint.initial_load_path:
        yield "checkpoint.initial_load_path", config.checkpoint.initial_load_path


def _check_files(job: Job) -> None:
    for key, folder in _paths(job):
        if not Path(folder).is_dir():
            raise ConfigError(f"{job.at(key)}: no such folder: {folder}")
    sections: list[tuple[str, Data]] = [("dataloader", job.config.dataloader)]
    if job.config.validator.enable:
        sections.append(("validator.data", job.config.validator.data))
        if not job.config.validator.data.dataset:
            raise ConfigError(
                f"{job.at('validator.data.dataset')}: expected the name or path of held-out data"
            )
    random = [locate(data)[0] == RANDOM_TOKENS for _, data in sections]
    if any(random) and not all(random) and not job.config.hf_assets_path:
        raise ConfigError(
            f"{job.at('validator.data.dataset')}: random tokens and text do not go together "
            "without a tokenizer; set hf_assets_path"
        )
    for section, data in sections:
        name, path = locate(data)
        try:
            kind = dataset_kind(name)
            if kind == "corpus":
                open_source(name, path, data.text_key)
        except ValueError as e:
            key = "dataset_path" if data.dataset_path else "dataset"
            raise ConfigError(f"{job.at(f'{section}.{key}')}: {e}") from e
        if kind != "corpus" and name != RANDOM_TOKENS and not job.config.hf_assets_path:
            raise ConfigError(
                f"{job.at('hf_assets_path')}: {name} is streamed, so no tokenizer can be trained "
                "on it; expected the folder of a tokenizer"
            )


def _check_restarts(job: Job) -> None:
    """Check that a restart would find what it goes on from."""
    if not job.config.max_restarts:
        return
    for key, expected, why in (
        ("checkpoint.enable", True, "a restart goes on from the last checkpoint"),
        ("checkpoint.load_only", False, "a restart goes on from the last checkpoint"),
        ("checkpoint.load_step", -1, "a restart would go back to that step each time"),
    ):
        if _get(job, key) != expected:
            raise ConfigError(
                f"{job.at('max_restarts')}: {why}; expected {key} = {str(expected).lower()}, "
                f"or max_restarts = 0"
            )


def check_for_plan(job: Job, world_size: int) -> None:
    """Raise ConfigError for what would make a job fail on any machine, whatever files are there.

    Args:
        job: The resolved job; its degrees may be those of another number of ranks.
        world_size: Ranks that it is planned for.
    """
    degrees(job)
    _check_numbers(job)
    check_mode(job)
    check_optimizer(job)
    _check_names(job)
    _check_shapes(job)
    _check_model(job)
    check_experts(job)
    check_qk_clip(job)
    _check_batch(job, world_size)


def check(job: Job, world_size: int, device: str) -> None:
    """Raise ConfigError for the first thing that would make the job fail.

    Args:
        job: The resolved job, after `with_degrees`.
        world_size: Ranks of the whole job.
        device: "cuda" or "cpu", what the ranks run on.
    """
    _check_numbers(job)
    check_mode(job)
    check_communication(job)
    check_optimizer(job)
    _check_names(job)
    _check_shapes(job)
    _check_device(job, device)
    vocabulary = _check_model(job)
    check_owner_cost(job)
    check_experts(job)
    check_qk_clip(job)
    _check_batch(job, _check_world(job, world_size))
    _check_files(job)
    _check_restarts(job)
    _check_tokenizer(job, vocabulary)
    check_checkpoint(job, world_size, device)
