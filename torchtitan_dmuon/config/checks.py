"""What a job must satisfy beyond the type of each key, checked before any process group exists."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torchtitan.components.tokenizer import HuggingFaceTokenizer

from torchtitan_dmuon.config.data_source import locate
from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.config.manager import Job
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
    "parallelism.expert_parallel_degree",
)


def _get(job: Job, key: str) -> float:
    value: object = job.config
    for name in key.split("."):
        value = getattr(value, name)
    assert isinstance(value, int | float)
    return value


def degrees(job: Job) -> int | None:
    """Return the number of ranks that the degrees multiply to, or None if one is left open (-1).

    Raises:
        ConfigError: a degree that is not a positive number (or -1 for the shard degree).
    """
    product, is_open = 1, False
    for name in _FACTORS:
        key = f"parallelism.{name}"
        value = int(_get(job, key))
        if value == -1 and name == "data_parallel_shard_degree":
            is_open = True
        elif value < 1:
            allowed = "at least 1" + (", or -1 for all that is left" if "shard" in name else "")
            raise ConfigError(f"{job.at(key)}: expected {allowed}, got {value}")
        else:
            product *= value
    return None if is_open else product


def _check_world(job: Job, world_size: int) -> int:
    """Check that the degrees fit the world. Returns the number of data-parallel ranks."""
    fixed = degrees(job)
    p = job.config.parallelism
    shown = " x ".join(f"{getattr(p, name)} {label}" for name, label in _FACTORS.items())
    model_parallel = (
        p.context_parallel_degree * p.tensor_parallel_degree * p.pipeline_parallel_degree
    )
    if fixed is None:
        least = p.data_parallel_replicate_degree * model_parallel
        if world_size % least:
            raise ConfigError(
                f"{job.at('parallelism')}: {world_size} ranks are not a multiple of {least}, "
                f"the product of the given degrees ({shown})"
            )
    elif fixed != world_size:
        raise ConfigError(
            f"{job.at('parallelism')}: the degrees ({shown}) need {fixed} ranks, but the job has "
            f"{world_size}; set NGPU={fixed} or --parallelism.data_parallel_shard_degree -1"
        )
    return world_size // int(model_parallel)


def _check_numbers(job: Job) -> None:
    for key in _AT_LEAST_ONE:
        if _get(job, key) < 1:
            raise ConfigError(f"{job.at(key)}: expected at least 1, got {_get(job, key)}")
    for key in ("optimizer.lr", "optimizer.eps", "optimizer.weight_decay", "training.max_norm"):
        if not 0 <= _get(job, key) < float("inf"):
            raise ConfigError(f"{job.at(key)}: expected a number >= 0, got {_get(job, key)}")
    for beta in job.config.optimizer.betas:
        if not 0 <= beta < 1:
            raise ConfigError(f"{job.at('optimizer.betas')}: expected 0 <= beta < 1, got {beta}")
    schedule = job.config.lr_scheduler
    if schedule.warmup_steps < 0:
        raise ConfigError(
            f"{job.at('lr_scheduler.warmup_steps')}: expected 0 or more, "
            f"got {schedule.warmup_steps}"
        )
    for name in ("decay_ratio", "min_lr_factor"):
        value = getattr(schedule, name)
        if value is not None and not 0 <= value <= 1:
            raise ConfigError(f"{job.at(f'lr_scheduler.{name}')}: expected 0 to 1, got {value}")


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
    if not job.config.training.disable_cuda_graphs:
        raise ConfigError(
            f"{job.at('training.disable_cuda_graphs')}: there are no CUDA graphs on a CPU; "
            "expected true"
        )


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


def check(job: Job, world_size: int, device: str) -> None:
    """Raise ConfigError for the first thing that would make the job fail.

    Args:
        job: The resolved job.
        world_size: Ranks of the whole job.
        device: "cuda" or "cpu", what the ranks run on.
    """
    _check_numbers(job)
    _check_device(job, device)
    vocabulary = _check_model(job)
    _check_batch(job, _check_world(job, world_size))
    _check_files(job)
    _check_tokenizer(job, vocabulary)
    checkpoint = job.config.checkpoint
    if checkpoint.create_seed_checkpoint and (world_size != 1 or not checkpoint.enable):
        raise ConfigError(
            f"{job.at('checkpoint.create_seed_checkpoint')}: a seed checkpoint is made by one rank "
            "with checkpoint.enable = true; set NGPU=1 and all degrees to 1"
        )
