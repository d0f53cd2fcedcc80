"""Optimizers of owned matrices as one of torchtitan's optimizer containers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.components.optimizer import OptimizersContainer

from torchtitan_dmuon.checkpoint.state import owner_state
from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.log import logger
from torchtitan_dmuon.models.heads import attentions
from torchtitan_dmuon.optim.owner_optimizer import OwnerOptimizer
from torchtitan_dmuon.optim.qk_clip import QKClip
from torchtitan_dmuon.optim.report import PHASES, RoutingReport, StepReport
from torchtitan_dmuon.ownership import summarize
from torchtitan_dmuon.runtime.api import clip_grad_norm_
from torchtitan_dmuon.runtime.site import canonical_name
from torchtitan_dmuon.runtime.transport import OperatorsRefused

STEADY_HIT_RATE = 0.999
"""Of gradients whose allocation is foreseen; a lower one is logged."""

_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


class OwnerContainer(OptimizersContainer):  # type: ignore[type-arg, misc, unused-ignore]
    """One `OwnerOptimizer` for each model part, with the interface that trainers use.

    Args:
        config: Options, and overrides for the parameters whose canonical names match a pattern.
        model_parts: Models that `dedicate_params` was called on.

    Attributes:
        routes: Where each parameter goes, part by part, with its base learning rates.

    Raises:
        ValueError: a pattern matches no trainable parameter, or what OwnerOptimizer raises.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """Options as in `OwnerOptimizer`. `implementation` is not used.

        `options` are those of the algorithm, with dtypes by their names.
        """

        algorithm: str = "muon"
        options: dict[str, Any] = field(default_factory=dict)
        adamw_lr: float = 3e-4
        adamw_betas: tuple[float, float] = (0.9, 0.95)
        adamw_eps: float = 1e-8
        adamw_weight_decay: float = 0.0
        publish: Literal["async", "sync"] = "async"
        nonfinite: Literal["skip", "error"] = "skip"
        qk_clip: float = 0.0

    optimizers: list[OwnerOptimizer]
    routes: list[RoutingReport]

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        self.model_parts = model_parts
        shared = {f.name for f in fields(OptimizersContainer.Config)} | {"options", "qk_clip"}
        own = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in shared}
        own = typed(own | config.options)
        self.optimizers = [
            OwnerOptimizer(
                model,
                **own,
                param_groups=_overrides(config, model),
                qk_clip=QKClip(attentions(model), config.qk_clip) if config.qk_clip else None,
            )
            for model in model_parts
        ]
        self._reports: list[StepReport] = []
        # Gradients born in the pool, and not, until the last call of step_metrics.
        self._counted = (0, 0, 0)
        self._told = False
        # Now: a scheduler replaces the rates by those of its first step.
        self.routes = [optimizer.routing() for optimizer in self.optimizers]
        parameters = [p for o in self.optimizers for g in o.param_groups for p in g["params"]]
        self._validate_params(parameters)
        self._post_init(parameters)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parts. Collective.

        Raises:
            ConfigError: the operators cannot run here, found when the pool opens.
        """
        try:
            super().step(closure)
        except OperatorsRefused as error:
            raise ConfigError(f"parallelism.{error}") from None
        self._reports += [optimizer.last_step for optimizer in self.optimizers]

    def clip_grad_norm_(
        self,
        max_norm: float,
        *,
        foreach: bool | None = None,
        pp_mesh: DeviceMesh | None = None,
        ep_enabled: bool = False,
    ) -> torch.Tensor:
        """Clip by one norm over owned and sharded gradients. Collective.

        Returns:
            The norm before clipping, a float32 scalar equal on all ranks.
        """
        (model,) = self.model_parts  # several need pipeline parallelism, which modes refuse
        return clip_grad_norm_(model, max_norm)

    def step_metrics(self) -> dict[str, float]:
        """Return what the steps since the last call did, over all ranks. Collective.

        Matrices orthogonalized per step (summed over ranks: in mode owner the number of matrices),
        steps skipped, and seconds per step by phase on the rank that took longest in it. On the
        operators the shares of gradients that were born in the pool, of those whose allocation was
        foreseen and of all, on the rank with the fewest.
        """
        reports, self._reports = self._reports, []
        steps = max(1, len(reports))
        times = [report.seconds for report in reports]
        done = sum(report.orthogonalized for report in reports)
        device = self.optimizers[0].runtime.device
        total = torch.tensor([float(done)], dtype=torch.float64, device=device)
        slowest = torch.tensor(
            [*(sum(t[phase] for t in times) / steps for phase in PHASES), *self._missed()],
            dtype=torch.float64,
            device=device,
        )
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(total)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
        clips = [o.qk_clip for o in self.optimizers if o.qk_clip is not None]
        skipped = sum(report.skipped for report in reports)
        counted = max(1, steps - skipped)
        return {
            "optimizer/matrices_per_step": float(total) / counted,
            "optimizer/skipped_steps": float(skipped),
            **{
                key: value
                for clip in clips
                for key, value in (
                    ("optimizer/max_attention_logit", float(clip.maximum)),
                    ("optimizer/clipped_heads", float(clip.clipped)),
                )
            },
            **{
                f"optimizer/{phase}(s)": seconds
                for phase, seconds in zip(PHASES, slowest.tolist(), strict=False)
            },
            **(
                self._tell(1.0 - float(slowest[-2]), 1.0 - float(slowest[-1]))
                if self.optimizers[0].runtime.hit_counters() is not None
                else {}
            ),
        }

    def _missed(self) -> tuple[float, float]:
        """Shares of the gradients since the last call that were not born in their places: of those
        whose signature was known, and of all that had a place."""
        now = self.optimizers[0].runtime.hit_counters()
        if now is None:
            return 0.0, 0.0
        counts = (now.hits, now.misses, now.learned + now.unlearned)
        hits, misses, others = (a - b for a, b in zip(counts, self._counted, strict=True))
        self._counted = counts
        given = hits + misses + others
        return misses / max(1, hits + misses), (misses + others) / max(1, given)

    def _tell(self, hit_rate: float, born_rate: float) -> dict[str, float]:
        """Return the rates as metrics; log them the first time, and when signatures miss."""
        runtime = self.optimizers[0].runtime
        first = runtime.communicator is not None and runtime.communicator.rank == 0
        if first and any(self._counted) and (hit_rate < STEADY_HIT_RATE or not self._told):
            self._told = True
            logger.info(
                "pool: %.2f%% of the gradients whose allocation was foreseen were born in it on "
                "the rank with the fewest, %.2f%% of all",
                100 * hit_rate,
                100 * born_rate,
            )
        return {"pool/gradient_hit_rate": hit_rate, "pool/gradient_born_rate": born_rate}

    def pool_bytes(self) -> dict[str, int]:
        """Return the symmetric pool's bytes on this rank by part; empty before it is open."""
        return dict(self.optimizers[0].runtime.pool.parts)

    def describe(self) -> str:
        """Return for people: parameters by kind with their routes, and the balance of owners."""
        parts = []
        for optimizer, routes in zip(self.optimizers, self.routes, strict=True):
            runtime = optimizer.runtime
            parts.append(brief(routes))
            if runtime.mode == "owner":
                parts.append(summarize(runtime.assignment, runtime.layers).table())
        return "\n\n".join(parts)

    def state_dict(self) -> dict[str, Any]:
        """Return the state by `state.<parameter>.<key>`, live; owned state as `HeldTensor`s."""
        return {k: v for o in self.optimizers for k, v in owner_state(o).items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: checkpoints are loaded in place, into what `state_dict` returns."""


def typed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as optimizers take them: a dtype for its name, None for auto."""
    result = dict(options)
    if isinstance(name := result.get("ns_dtype"), str):
        result["ns_dtype"] = None if name == "auto" else _DTYPES.get(name, name)
    return result


def _overrides(config: OwnerContainer.Config, model: nn.Module) -> list[dict[str, Any]]:
    """Return `param_groups` for the entries of a config; the first match wins."""
    left = {canonical_name(n): p for n, p in model.named_parameters() if p.requires_grad}
    groups = []
    for entry in config.param_groups:
        pattern = re.compile(entry.pattern)
        names = [name for name in left if pattern.search(name)]
        if not names:
            raise ValueError(
                f"optimizer.param_groups: pattern '{entry.pattern}' matches no trainable parameter "
                "that an earlier entry has left"
            )
        params = [left.pop(name) for name in names]
        groups.append({"params": params, **typed(entry.optimizer_kwargs)})
    return groups


def brief(report: RoutingReport) -> str:
    """Return a routing report as a table with one row for parameters that differ by number only."""
    kinds: dict[tuple[str, ...], list[int]] = {}
    for row in report.rows:
        shape = "x".join(map(str, row.shape)) or "scalar"
        rates = ", ".join(dict.fromkeys(f"{lr:.3g}" for lr in row.lr))
        where = "owned" if row.holder[:1].isdigit() else row.holder
        key = (re.sub(r"\b\d+\b", "*", row.name), shape, row.route, where, rates)
        counts = kinds.setdefault(key, [0, 0])
        counts[0] += 1
        counts[1] += row.matrices
    lines: list[Sequence[str]] = [
        ("parameters", "number", "shape", "route", "held", "matrices", "learning rate")
    ]
    for (name, shape, route, where, rates), (number, matrices) in kinds.items():
        lines.append((name, str(number), shape, route, where, str(matrices or ""), rates))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([*(line.rstrip() for line in text), report.totals()])
