"""What optimizer and mode must satisfy together, checked before any process group exists."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator
from dataclasses import fields

import torch
from torchtitan.components.optimizer import ParamGroupConfig

from torchtitan_dmuon.config import toml_io
from torchtitan_dmuon.config.algorithm import MUON_KEYS, rule_of
from torchtitan_dmuon.config.errors import ConfigError, nearest
from torchtitan_dmuon.config.manager import Job
from torchtitan_dmuon.config.schema import Optimizer, Parallelism
from torchtitan_dmuon.models.heads import attentions
from torchtitan_dmuon.models.matrices import model_matrices
from torchtitan_dmuon.models.registry import get_model_spec
from torchtitan_dmuon.optim.matrix_optimizer import find
from torchtitan_dmuon.ownership import CostTable

_TORCH_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Muon": torch.optim.Muon,
}

_MODES = {"AdamW": ("fsdp",), "Adam": ("fsdp",), "Muon": ("fsdp",), "DMuon": ("owner", "gather")}
"""The modes that an optimizer works in."""

_ADAMW_OPTIONS = ("adamw_lr", "adamw_betas", "adamw_eps", "adamw_weight_decay")

_ADAMW_ONLY = {"betas": "adamw_betas", "eps": "adamw_eps"}
_DMUON_ONLY = (
    "algorithm",
    "algorithm_options",
    "ns_dtype",
    "ns_method",
    "ns_restarts",
    "per_head",
    "qk_clip",
    "publish",
    "nonfinite",
)
_MUON_ONLY = (*MUON_KEYS, *_ADAMW_OPTIONS, *_DMUON_ONLY)
_OWNED_ONLY = (
    "small_matrix_numel",
    "byte_cap",
    "owner_cost",
    "owner_assignment",
    "prefetch_depth",
    "replica_check_interval",
    "communication",
)


def check_optimizer(job: Job) -> None:
    """Check the optimizer's keys and groups. Raises ConfigError.

    A key that this optimizer does not read is refused if the job sets it to another value than the
    default, unless the job has a `line`: then the keys serve the other lines.
    """
    for name, message in _numbers(job.config.optimizer):
        raise ConfigError(f"{job.at(f'optimizer.{name}')}: {message}")
    _check_unread(job)
    _check_algorithm(job)
    _check_groups(job)


def _numbers(o: Optimizer) -> Iterator[tuple[str, str]]:
    """Yield the keys whose numbers are out of range, each with a message."""
    for name in (
        "lr",
        "eps",
        "weight_decay",
        "adamw_lr",
        "adamw_eps",
        "adamw_weight_decay",
        "qk_clip",
    ):
        value = getattr(o, name)
        if not 0 <= value < float("inf"):
            yield name, f"expected a number >= 0, got {value}"
    for name in ("betas", "adamw_betas"):
        for beta in getattr(o, name):
            if not 0 <= beta < 1:
                yield name, f"expected 0 <= beta < 1, got {beta}"
    if not 0 <= o.momentum < 1:
        yield "momentum", f"expected 0 <= momentum < 1, got {o.momentum}"
    # torch.optim.Muon refuses 100 and more.
    if not 1 <= o.ns_steps < 100:
        yield "ns_steps", f"expected 1 to 99, got {o.ns_steps}"


def _check_algorithm(job: Job) -> None:
    """Check the matrix optimizer's name and options."""
    o, p = job.config.optimizer, job.config.parallelism
    if o.name != "DMuon":
        return
    options = "optimizer.algorithm_options"
    if o.algorithm == "muon" and o.algorithm_options:
        raise ConfigError(
            f"{job.at(options)}: options of algorithm muon are keys of [optimizer]: "
            f"{', '.join(MUON_KEYS)}"
        )
    for key in ("lr", "weight_decay"):
        if key in o.algorithm_options:
            raise ConfigError(f"{job.at(options)}: {key} is a key of [optimizer]: optimizer.{key}")
    try:
        find(o.algorithm)
    except ValueError as e:
        text = str(e).removeprefix("algorithm: ")
        raise ConfigError(f"{job.at('optimizer.algorithm')}: {text}") from e
    try:
        rule_of(o)
    except ValueError as e:
        key, _, text = str(e).partition(": ")
        if key in o.algorithm_options or not hasattr(o, key):
            raise ConfigError(f"{job.at(options)}: {e}") from e
        raise ConfigError(f"{job.at(f'optimizer.{key}')}: {text}") from e
    if p.mode == "gather" and o.algorithm != "muon":
        raise ConfigError(
            f'{job.at("optimizer.algorithm")}: mode gather, the baseline, knows "muon" only, '
            f"got {o.algorithm!r}"
        )


_HF_REMEDIES = {
    "last_save_in_hf": "dmuon export turns a checkpoint into a Hugging Face folder",
    "initial_load_in_hf": "dmuon import turns a Hugging Face folder into a checkpoint, for "
    "checkpoint.initial_load_path",
}


def check_mode(job: Job) -> None:
    """Check that mode and optimizer fit, and that the mode can do what is asked.

    Raises:
        ConfigError: where they do not.
    """
    p, o = job.config.parallelism, job.config.optimizer
    if p.mode not in _MODES[o.name]:
        fitting = [name for name, modes in _MODES.items() if p.mode in modes]
        raise ConfigError(
            f"{job.at('optimizer.name')}: {o.name} works in mode {_either(_MODES[o.name])}, but "
            f'parallelism.mode is "{p.mode}" ({_place(job, "parallelism.mode")}); set one of the '
            f"two: with this mode the name can be {_either(fitting)}"
        )
    if p.mode == "fsdp":
        return
    for name in ("tensor", "context", "pipeline", "expert"):
        degree = getattr(p, f"{name}_parallel_degree")
        if degree > 1:
            raise ConfigError(
                f"{job.at(f'parallelism.{name}_parallel_degree')}: mode {p.mode} does not go with "
                f"{name} parallelism yet; expected 1, got {degree}"
            )
    if p.spmd_backend != "partial_dtensor":
        raise ConfigError(
            f"{job.at('parallelism.spmd_backend')}: owned layers are plain tensors; expected "
            f'"partial_dtensor" (the default) in mode {p.mode}'
        )
    training, checkpoint = job.config.training, job.config.checkpoint
    if training.enable_cpu_offload:
        raise ConfigError(
            f"{job.at('training.enable_cpu_offload')}: mode {p.mode} keeps its state on the "
            "device; expected false"
        )
    if not training.disable_cuda_graphs:
        raise ConfigError(
            f"{job.at('training.disable_cuda_graphs')}: CUDA graphs do not go with mode {p.mode}; "
            "expected true"
        )
    if o.qk_clip and job.config.compile.enable and "model" in job.config.compile.components:
        raise ConfigError(
            f"{job.at('optimizer.qk_clip')}: observes logits in a way that compiled layers do not "
            'go with; expected 0, or compile.enable = false, or components without "model"'
        )
    for key, remedy in _HF_REMEDIES.items():
        if checkpoint.enable and getattr(checkpoint, key):
            raise ConfigError(
                f"{job.at(f'checkpoint.{key}')}: expected false in mode {p.mode}; {remedy}"
            )


def check_communication(job: Job) -> None:
    """Refuse the operators where matrices have no owners.

    Raises:
        ConfigError: communication "operators" in mode gather.
    """
    p = job.config.parallelism
    if p.mode == "gather" and p.communication == "operators":
        raise ConfigError(
            f"{_place(job, 'parallelism.communication')}: mode gather, the baseline, knows "
            '"c10d" only; mode = "owner" goes with "operators"'
        )


def check_owner_cost(job: Job) -> None:
    """Check that a table of costs is there and has every matrix of the model.

    Raises:
        ConfigError: an unknown name, a file that is no table, a table for another algorithm, or a
            shape that it lacks.
    """
    cost = job.config.parallelism.owner_cost
    if job.config.parallelism.mode == "fsdp" or cost in ("measured", "model"):
        return
    model, o = job.config.model, job.config.optimizer
    try:
        table = CostTable.load(cost)
        spec = get_model_spec(model.name, model.flavor, attn_backend="sdpa")
        table.check(model_matrices(spec, per_head=o.per_head), rule_of(o).label())
    except (ValueError, OSError) as e:
        raise ConfigError(f"{job.at('parallelism.owner_cost')}: {e}") from e


def check_experts(job: Job) -> None:
    """Refuse torch.optim.Muon on a model with experts.

    It takes 2-D weights only, so most of the model would be AdamW's; and under HSDP it fails on the
    one-row gate of the shared experts, whose update DTensor cannot add in place.

    Raises:
        ConfigError: the optimizer is torch's Muon, and the model keeps experts in 3-D stacks.
    """
    model = job.config.model
    if job.config.optimizer.name != "Muon":
        return
    layers = get_model_spec(model.name, model.flavor, attn_backend="sdpa").model.layers
    if any(getattr(layer, "moe", None) is not None for layer in layers):
        raise ConfigError(
            f"{_place(job, 'optimizer.name')}: torch.optim.Muon takes 2-D weights, and "
            f"{model.name} {model.flavor} keeps its experts in 3-D stacks; expected line A, B or C"
        )


def check_qk_clip(job: Job) -> None:
    """Check that the model has attention that QK-clip can scale. Raises ConfigError."""
    model, o = job.config.model, job.config.optimizer
    if o.name != "DMuon" or not o.qk_clip:
        return
    spec = get_model_spec(model.name, model.flavor, attn_backend="sdpa")
    try:
        with torch.device("meta"):
            attentions(spec.model.build())
    except ValueError as e:
        text = str(e).removeprefix("qk_clip: ")
        raise ConfigError(f"{job.at('optimizer.qk_clip')}: {text}") from e


def _place(job: Job, key: str) -> str:
    # "mode" may come from "line", which then is what the user would change.
    return job.at("line" if job.config.line else key)


def _either(names: Collection[str]) -> str:
    return " or ".join(f'"{name}"' for name in names)


def _check_unread(job: Job) -> None:
    if job.config.line:
        return
    o, p = job.config.optimizer, job.config.parallelism
    unread: dict[str, str] = {}
    if o.name == "DMuon" and o.algorithm != "muon":
        hint = f" with algorithm {o.algorithm}; its options are in optimizer.algorithm_options"
        unread |= {f"optimizer.{k}": hint for k in MUON_KEYS}
    if o.name in ("DMuon", "Muon"):
        unread |= {f"optimizer.{k}": f"; did you mean '{v}'?" for k, v in _ADAMW_ONLY.items()}
    if o.name == "Muon":
        unread |= {f"optimizer.{k}": "" for k in _DMUON_ONLY}
    if o.name in ("AdamW", "Adam"):
        hint = '; did you mean optimizer.name = "DMuon"?'
        unread |= {f"optimizer.{k}": hint for k in _MUON_ONLY}
    if p.mode == "fsdp":
        hint = f'; parallelism.mode is "fsdp", expected {_either(_MODES["DMuon"])} with it'
        unread |= {f"parallelism.{k}": hint for k in _OWNED_ONLY}
    sections = {
        "optimizer": (o, Optimizer()),
        "parallelism": (p, Parallelism()),
    }
    for key, hint in unread.items():
        section, _, name = key.partition(".")
        value, default = (getattr(s, name) for s in sections[section])
        if value != default:
            raise ConfigError(f"{job.at(key)}: nothing reads it with {o.name}{hint}")


def _check_groups(job: Job) -> None:
    """Check the entries of param_groups, whose options torch looks at only when it uses them."""
    o = job.config.optimizer
    names = ["DMuon"] if o.name == "DMuon" else [n for n in _TORCH_OPTIMIZERS if n != "Muon"]
    if o.name == "Muon":
        names.append("Muon")
    for number, group in enumerate(o.param_groups):
        where = job.at(f"optimizer.param_groups[{number}]")
        if group.optimizer_name not in names:
            close = nearest(group.optimizer_name, names)
            raise ConfigError(
                f"{where}: unknown optimizer '{group.optimizer_name}'{close or ';'} "
                f'expected one of {", ".join(names)} with optimizer.name = "{o.name}"'
            )
        try:
            re.compile(group.pattern)
        except re.error as e:
            raise ConfigError(f"{where}: pattern is not a regular expression: {e}") from e
        _check_options(where, group, o)
        if o.name == "DMuon":
            source = next(s for s in job.sources if s.line("optimizer.param_groups") is not None)
            prefix = f"optimizer.param_groups[{number}].optimizer_kwargs."
            given = group.optimizer_kwargs
            adamw = {k: v for k, v in given.items() if k in _ADAMW_OPTIONS}
            for name, message in _numbers(toml_io.merge(o, adamw, source, prefix)):
                raise ConfigError(f"{where}: {name}: {message}")
            try:
                rule_of(o, {k: v for k, v in given.items() if k not in adamw})
            except ValueError as e:
                raise ConfigError(f"{where}: {e}") from e


def _check_options(where: str, group: ParamGroupConfig, o: Optimizer) -> None:
    known: Collection[str]
    if group.optimizer_name == "DMuon":
        known = [f.name for f in fields(find(o.algorithm))] + list(_ADAMW_OPTIONS)
    else:
        known = inspect.signature(_TORCH_OPTIMIZERS[group.optimizer_name]).parameters
    for name in group.optimizer_kwargs:
        if name not in known or name == "params":
            raise ConfigError(
                f"{where}: unknown argument '{name}' of {group.optimizer_name}"
                f"{nearest(name, known)}"
            )
