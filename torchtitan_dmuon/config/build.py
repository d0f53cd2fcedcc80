"""A checked job -> torchtitan's Trainer.Config."""

from __future__ import annotations

import copy
import dataclasses
from datetime import timedelta

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer
from torchtitan.components.validate import Validator
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    FullAC,
    MemoryBudgetAC,
    SelectiveAC,
)

from torchtitan_dmuon.baselines.torch_muon import MATRICES, TorchMuonContainer
from torchtitan_dmuon.checkpoint.manager import CheckpointManager
from torchtitan_dmuon.config.algorithm import options_of, rule_of
from torchtitan_dmuon.config.data_source import locate
from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.config.manager import Job
from torchtitan_dmuon.config.schema import Data, JobConfig, Optimizer, TrainData
from torchtitan_dmuon.data import (
    RANDOM_TOKENS,
    CorpusDataLoader,
    CorpusTokenizer,
    VocabOnlyTokenizer,
    loader_config,
    register_datasets,
)
from torchtitan_dmuon.log import logger
from torchtitan_dmuon.models.init import make_init_layout_independent
from torchtitan_dmuon.models.registry import get_model_spec
from torchtitan_dmuon.optim.container import OwnerContainer
from torchtitan_dmuon.optim.newton_schulz import QUINTIC
from torchtitan_dmuon.parallelize import with_modes
from torchtitan_dmuon.trainer import Trainer


def _attention(config: JobConfig, device: str) -> str:
    chosen = config.model.attn_backend
    if chosen != "auto":
        return chosen
    # Flex attention has no backward on a CPU; SDPA's mask is quadratic, so GPUs take flex.
    return "sdpa" if device == "cpu" else "flex"


def _optimizer(config: JobConfig) -> OptimizersContainer.Config:
    o = config.optimizer
    match o.name:
        case "DMuon":
            return _dmuon(o)
        case "Muon":
            return _torch_muon(o)
    everything_else = ParamGroupConfig(
        pattern=r".*",
        optimizer_name=o.name,
        optimizer_kwargs={
            "lr": o.lr,
            "betas": tuple(o.betas),
            "eps": o.eps,
            "weight_decay": o.weight_decay,
        },
    )
    return OptimizersContainer.Config(
        param_groups=[*o.param_groups, everything_else], implementation=o.implementation
    )


def _dmuon(o: Optimizer) -> OwnerContainer.Config:
    shared = {f.name for f in dataclasses.fields(OwnerContainer.Config)} - {"implementation"}
    values = {f.name: getattr(o, f.name) for f in dataclasses.fields(o) if f.name in shared}
    return OwnerContainer.Config(**values, options=options_of(o))


def _torch_muon(o: Optimizer) -> TorchMuonContainer.Config:
    matrices = ParamGroupConfig(
        pattern=MATRICES,
        optimizer_name="Muon",
        optimizer_kwargs={
            "lr": o.lr,
            "weight_decay": o.weight_decay,
            "momentum": o.momentum,
            "nesterov": o.nesterov,
            "ns_steps": o.ns_steps,
            "ns_coefficients": _triple(o.ns_coefficients),
            "adjust_lr_fn": o.adjust_lr_fn,
        },
    )
    everything_else = ParamGroupConfig(
        pattern=r".*",
        optimizer_name="AdamW",
        optimizer_kwargs={
            "lr": o.adamw_lr,
            "betas": tuple(o.adamw_betas),
            "eps": o.adamw_eps,
            "weight_decay": o.adamw_weight_decay,
        },
    )
    return TorchMuonContainer.Config(
        param_groups=[*o.param_groups, matrices, everything_else], implementation=o.implementation
    )


def _triple(coefficients: object) -> tuple[float, float, float]:
    """Return the one triple that torch's Muon takes."""
    if isinstance(coefficients, tuple):
        a, b, c = coefficients
        return a, b, c
    return QUINTIC


def build_loss(config: JobConfig, vocab_size: int) -> BaseLoss.Config:
    """Return the job's loss over a vocabulary."""
    cross_entropy = CrossEntropyLoss.Config(global_vocab_size=vocab_size)
    if config.loss.name == "cross_entropy":
        return cross_entropy
    return ChunkedLossWrapper.Config(num_chunks=config.loss.num_chunks, loss_fn=cross_entropy)


def build_activation_checkpoint(config: JobConfig) -> ActivationCheckpointing.Config | None:
    """Return the job's recomputation; None: there is none."""
    a = config.activation_checkpoint
    common = {
        "preserve_rng_state": a.preserve_rng_state,
        "determinism_check": a.determinism_check,
        "debug": a.debug,
    }
    match a.mode:
        case "none":
            return None
        case "full":
            return FullAC.Config(**common)
        case "selective":
            return SelectiveAC.Config(
                force_recompute_mm_shapes_by_fqns=a.force_recompute_mm_shapes_by_fqns, **common
            )
        case "memory_budget":
            return MemoryBudgetAC.Config(
                memory_budget=a.memory_budget,
                visualize_memory_budget_pareto=a.visualize_memory_budget_pareto,
                **common,
            )


def _tokenizer(config: JobConfig, vocab_size: int) -> BaseTokenizer.Config:
    if config.hf_assets_path:
        return HuggingFaceTokenizer.Config()
    data = config.dataloader
    name, path = locate(data)
    if name == RANDOM_TOKENS:
        return VocabOnlyTokenizer.Config(vocab_size=vocab_size)
    return CorpusTokenizer.Config(
        vocab_size=config.tokenizer.vocab_size,
        dataset=name,
        dataset_path=path,
        text_key=data.text_key,
        cache_folder=data.cache_folder,
    )


def _loader(data: Data, seed: int, shuffle: bool) -> BaseDataLoader.Config:
    return loader_config(
        *locate(data),
        text_key=data.text_key,
        seed=seed,
        shuffle=shuffle,
        infinite=data.infinite,
        cache_folder=data.cache_folder,
    )


def _train_loader(data: TrainData) -> BaseDataLoader.Config:
    return _loader(data, data.seed, data.shuffle)


def _validator(config: JobConfig) -> Validator.Config:
    v = config.validator
    if not v.enable:
        return Validator.Config(enable=False)
    data = _loader(v.data, seed=0, shuffle=False)
    return Validator.Config(enable=True, freq=v.freq, steps=v.steps, dataloader=data)


def _checkpoint(config: CheckpointManager.Config) -> CheckpointManager.Config:
    # Without a path to load from this flag means nothing, and torchtitan warns of just that each
    # time the dataclass is built.
    if config.initial_load_path is None and not config.initial_load_in_hf:
        config = copy.copy(config)
        config.initial_load_model_only = False
    return config


def prepare_data(config: Trainer.Config, data_parallel: int) -> None:
    """Train the tokenizer and tokenise the data, if need be, before any rank starts.

    Ranks that start later find both in the cache. Streamed data has nothing to prepare.

    Args:
        config: What `build` returned.
        data_parallel: Ranks that read different samples.

    Raises:
        ConfigError: the data cannot be used; OSError: the cache folder cannot.
    """
    loaders = [config.dataloader]
    if config.validator.enable:
        loaders.append(config.validator.dataloader)
    for loader in loaders:
        if isinstance(loader, CorpusDataLoader.Config):
            data = loader.build(
                dp_world_size=data_parallel,
                dp_rank=0,
                tokenizer=config.tokenizer.build(tokenizer_path=config.hf_assets_path),
                seq_len=config.training.seq_len,
                local_batch_size=config.training.local_batch_size,
            )
            logger.info(data.describe())


def build(job: Job, device: str) -> Trainer.Config:
    """Turn a job that passed `check` into the config that `.build()` makes a trainer of.

    Args:
        job: The resolved job.
        device: "cuda" or "cpu", what the ranks run on.

    Raises:
        ConfigError: torchtitan's own cross-checks of sections refuse the job.
    """
    config = job.config
    register_datasets()
    backend = _attention(config, device)
    spec = with_modes(
        get_model_spec(config.model.name, config.model.flavor, attn_backend=backend),
        timeout=timedelta(seconds=config.comm.train_timeout_seconds),
        algorithm=rule_of(config.optimizer) if config.optimizer.name == "DMuon" else None,
        per_head=config.optimizer.per_head,
    )
    make_init_layout_independent(spec.model)
    vocab_size = spec.model.vocab_size
    try:
        result = Trainer.Config(
            model_spec=spec,
            hf_assets_path=config.hf_assets_path,
            dump_folder=config.dump_folder,
            profiler=config.profiler,
            metrics=config.metrics,
            tokenizer=_tokenizer(config, vocab_size),
            dataloader=_train_loader(config.dataloader),
            optimizer=_optimizer(config),
            lr_scheduler=config.lr_scheduler,
            training=config.training,
            parallelism=config.parallelism,
            checkpoint=_checkpoint(config.checkpoint),
            activation_checkpoint=build_activation_checkpoint(config),
            compile=config.compile,
            comm=config.comm,
            validator=_validator(config),
            debug=config.debug,
            override=config.override,
            loss=build_loss(config, vocab_size),
        )
        # The model's own checks against the job; the trainer repeats this on the config it builds.
        copy.deepcopy(spec.model).update_from_config(config=result)
        return result
    except (ValueError, AssertionError, NotImplementedError) as e:
        raise ConfigError(f"{job.path}: {' '.join(str(e).split())}") from e
