"""The optimizer of a model with owned matrices: a matrix optimizer for them, AdamW for the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from torchtitan_dmuon.arguments import expect
from torchtitan_dmuon.optim import owned_state
from torchtitan_dmuon.optim.adamw_rule import new_state
from torchtitan_dmuon.optim.algorithms.muon import MuonRule
from torchtitan_dmuon.optim.matrix_optimizer import MatrixOptimizer, check_known
from torchtitan_dmuon.optim.options import (
    Algorithm,
    check_adamw,
    class_of,
    defaults,
    listed,
)
from torchtitan_dmuon.optim.qk_clip import QKClip
from torchtitan_dmuon.optim.report import PhaseClock, RoutingReport, StepReport
from torchtitan_dmuon.optim.routing import routing_report
from torchtitan_dmuon.optim.saved import SavedState
from torchtitan_dmuon.optim.update_pass import UpdatePass
from torchtitan_dmuon.runtime.dedicate import dedicate_params, runtime_of
from torchtitan_dmuon.runtime.gradients import Gradients, agree_on_gradients
from torchtitan_dmuon.runtime.group import OwnedParameter
from torchtitan_dmuon.runtime.runtime import Runtime
from torchtitan_dmuon.runtime.site import sites_of

logger = logging.getLogger("torchtitan_dmuon")

_ADAMW = ("lr", "betas", "eps", "weight_decay")
_ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")
_NO_MATRIX = "no trainable parameter takes the matrix route; all are frozen"


class OwnerOptimizer(torch.optim.Optimizer):
    """A matrix optimizer for a model's matrices, on their owners; AdamW for everything else.

    The matrix route runs once per matrix and step, by its owner, on the reduced gradient. The AdamW
    route is `torch.optim.AdamW`: on the owner for a layer's small tensors, on each shard for what
    `fully_shard` holds. Afterwards owners hand new weights on to the other rows, parameter by
    parameter in forward order (paper sections 3 and 4).

    `param_groups` are torch's: every trainable parameter is in exactly one, with `route`,
    `param_names` and the options of its route (`lr`, `weight_decay`, ...), so learning-rate
    schedulers work as with any optimizer. State is per parameter: what the matrix optimizer keeps
    (`momentum_buffer` for Muon; `<algorithm>_<key>` for others) where this rank owns the matrix,
    with `.<i>` behind it for matrices of a parameter with several; `step`, `exp_avg` and
    `exp_avg_sq` on the AdamW route.

    Gradients live at their owners after backward, not in `Parameter.grad`: clip with
    `torchtitan_dmuon.clip_grad_norm_`, forget them with `zero_grad` (the optimizer's or the
    model's). `step` is collective: every rank calls it. Schedulers that cycle momentum (OneCycleLR)
    need `cycle_momentum=False`, since the routes have different momenta.

    Args:
        model: What `dedicate_params` was called on (called here if there is only one process).
        algorithm: The matrix optimizer: "muon", "normuon", "soap", "shampoo", what `register` made
            known, "module:Class", a subclass of `MatrixOptimizer`, or an instance, which has the
            defaults. None: what `dedicate_params` balanced owners for.
        adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay: Of the AdamW route.
        publish: "async": new weights travel while the step and the next forward go on. "sync": the
            step waits for them. The bits are the same.
        nonfinite: What a step does if a gradient has an infinity or NaN on any rank: "skip" leaves
            weights and state untouched on all ranks, warns with the parameters' names and reports
            it in `last_step`; "error" raises FloatingPointError on all ranks.
        qk_clip: Clips query and key weights where attention logits grow too large.
        param_groups: Overrides: dicts with `params` (parameters of the model) and any of the
            options, by the names of this signature. Other parameters get the defaults.
        options: Of the matrix optimizer: its fields, `lr` and `weight_decay` among them. Those left
            out have the defaults of its class.

    Raises:
        ValueError: a value out of range, an unknown option or algorithm, a parameter that is
            nobody's, twice or not the model's, no trainable matrix, or a parameter outside the
            layers that is not sharded though there are several ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: Algorithm | None = None,
        *,
        adamw_lr: float = 3e-4,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.0,
        publish: Literal["async", "sync"] = "async",
        nonfinite: Literal["skip", "error"] = "skip",
        qk_clip: QKClip | None = None,
        param_groups: Sequence[dict[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        expect("publish", publish, lambda v: v in ("async", "sync"), "async or sync")
        expect("nonfinite", nonfinite, lambda v: v in ("skip", "error"), "skip or error")
        if not sites_of(model) and not (dist.is_initialized() and dist.get_world_size() > 1):
            dedicate_params(model, algorithm=algorithm or MuonRule)
        self.model = model
        self.runtime: Runtime = runtime_of(model)
        chosen = self.runtime.algorithm if algorithm is None else algorithm
        self.algorithm = self._checked(class_of(chosen))
        if self.runtime.device.type == "meta":
            raise ValueError(
                f"{type(self).__name__}: the model is on the meta device; call to_empty(...) first"
            )
        self.publish = publish
        self.nonfinite = nonfinite
        self.qk_clip = qk_clip
        self.last_step = StepReport()
        self._entries = {
            e.parameter: (g, i) for g in self.runtime.groups for i, e in enumerate(g.parameters)
        }
        self._names = {e.parameter: e.name for g in self.runtime.groups for e in g.parameters}
        self._names.update({p: name for name, p in self.runtime.other_parameters()})
        self._defaults = {
            **defaults(chosen),
            "adamw_lr": adamw_lr,
            "adamw_betas": adamw_betas,
            "adamw_eps": adamw_eps,
            "adamw_weight_decay": adamw_weight_decay,
        }
        check_known(options, list(self._defaults), self.algorithm.label())
        self._defaults.update(options)
        self._spoiled: set[str] = set()
        super().__init__(self._all_groups(param_groups or ()), {})
        self._check_routes()
        self._check_clipped()
        self._moves = self.runtime.moves

    def _checked(self, chosen: type[MatrixOptimizer]) -> type[MatrixOptimizer]:
        balanced = type(self.runtime.algorithm)
        if self.runtime.mode == "gather" and chosen is not MuonRule:
            raise ValueError(
                f"algorithm: mode gather, the baseline, knows muon only, got {chosen.label()!r}"
            )
        if chosen is not balanced:
            logger.warning(
                "owners are balanced for the cost of %s, not of %s; give dedicate_params the "
                "algorithm too",
                balanced.label(),
                chosen.label(),
            )
        return chosen

    # -- parameter groups ----------------------------------------------------------------------

    def _all_groups(self, overrides: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        groups = [{**group, "params": listed(group)} for group in overrides]
        claimed = {p for group in groups for p in group["params"]}
        rest = [p for p in self._names if p.requires_grad and p not in claimed]
        if not rest and not groups:
            # Before torch says that its list is empty.
            raise ValueError(f"{type(self).__name__}: {_NO_MATRIX}")
        return [*groups, {"params": rest}] if rest else groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model, with options by the names of the constructor.

        The group is split by route, since the routes have different options.

        Raises:
            ValueError: an unknown option or a value out of range, a parameter that is not the
                model's or is in a group already.
        """
        options = {k: v for k, v in param_group.items() if k not in ("params", "param_names")}
        check_known(options, list(self._defaults), self.algorithm.label(), "param_groups: ")
        merged = {**self._defaults, **options}
        params = listed(param_group)
        for parameter in params:
            if parameter not in self._names:
                what = getattr(parameter, "shape", parameter)
                raise ValueError(f"param_groups: a parameter ({what}) is not in the model")
        matrix = {f.name: merged[f.name] for f in fields(self.algorithm)}
        rule = self.algorithm.of(matrix)
        adamw = {key: merged[f"adamw_{key}"] for key in _ADAMW}
        check_adamw(adamw)
        for route, values in (("matrix", matrix), ("adamw", adamw)):
            members = [p for p in params if self._is_matrix(p) == (route == "matrix")]
            if members:
                names = [self._names[p] for p in members]
                super().add_param_group(
                    {"params": members, "route": route, **values, "param_names": names}
                )
                for parameter in members:
                    self._make_state(parameter, rule)

    def _is_matrix(self, parameter: nn.Parameter) -> bool:
        entry = self._entry(parameter)
        return bool(entry and entry.matrices)

    def _entry(self, parameter: nn.Parameter) -> OwnedParameter | None:
        place = self._entries.get(parameter)
        return place[0].parameters[place[1]] if place else None

    def _check_routes(self) -> None:
        if not any(group["route"] == "matrix" for group in self.param_groups):
            raise ValueError(f"{type(self).__name__}: {_NO_MATRIX}")
        for group in self.runtime.groups:
            for entry in group.parameters:
                if any(m._parameters.get(name) is not entry.parameter for m, name in entry.places):
                    raise ValueError(
                        f"{entry.name}: owned, but replaced since dedicate_params; give it to "
                        "fully_shard(..., ignored_params=owned.parameters)"
                    )
        for name, parameter in self.runtime.other_parameters():
            if parameter.requires_grad and not parameter.is_floating_point():
                raise ValueError(
                    f"{name}: {parameter.dtype} parameters are not supported; freeze it"
                )
        if self.runtime.communicator is None:
            return
        for name, parameter in self.runtime.other_parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                raise ValueError(
                    f"{name}: neither owned nor sharded, so ranks would drift apart; call "
                    "fully_shard(model, mesh=mesh, ignored_params=owned.parameters) before the "
                    "optimizer is made"
                )

    def _check_clipped(self) -> None:
        owned = {e.name for g in self.runtime.groups for e in g.parameters}
        for name in self.qk_clip.parameters if self.qk_clip else ():
            if name not in owned:
                raise ValueError(f"qk_clip: {name} is not an owned parameter of the model")

    # torch's GradScaler asks for this, and then hands over its scale.
    _step_supports_amp_scaling = True

    def _refuse_grad_scale(self, value: object) -> None:
        raise NotImplementedError(
            f"{type(self).__name__}: GradScaler does not reach the gradients at the owners; "
            "compute in bfloat16"
        )

    grad_scale = property(fset=_refuse_grad_scale)

    # -- state -------------------------------------------------------------------------------

    def _make_state(self, parameter: nn.Parameter, rule: MatrixOptimizer) -> None:
        """Make all state at once, so that every rank has it whatever gradients come."""
        place = self._entries.get(parameter)
        if place is None:
            self.state[parameter] = new_state(parameter.detach(), parameter.dtype)
            return
        group, index = place
        entry = group.parameters[index]
        for s in group.owned:
            if s.parameter != index:
                continue
            if entry.matrices:
                self.state[parameter].update(owned_state.make(rule, group, s))
            else:
                like = group.masters[s].view(entry.shape if s.numel == entry.numel else -1)
                self.state[parameter].update(new_state(like, like.dtype))

    def saved_state(self) -> Iterator[SavedState]:
        """Yield all state for a checkpoint: live tensors, the same entries on every rank."""
        for options in self.param_groups:
            rule = self.algorithm.of(options) if options["route"] == "matrix" else None
            for parameter, name in zip(options["params"], options["param_names"], strict=True):
                place = self._entries.get(parameter)
                if place is None:
                    for key in _ADAMW_STATE:
                        value = self.state[parameter][key]
                        yield SavedState(name, key, parameter.shape, value.dtype, value=value)
                elif rule is not None:
                    yield from owned_state.saved(rule, *place, self.state.get(parameter, {}))
                else:
                    yield from owned_state.saved_adamw(*place, self.state.get(parameter, {}))

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this rank gave, in the same layout of ranks and owners.

        Raises:
            ValueError: the state is that of other owners, or has another shape.
        """
        mine = {p: dict(entries) for p, entries in self.state.items()}
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        members = [p for group in self.param_groups for p in group["params"]]
        loaded = {p: state_dict["state"].get(i, {}) for i, p in zip(ids, members, strict=False)}
        # All checks before the first write: a refused state leaves the optimizer as it was.
        for parameter, entries in loaded.items():
            self._check_loaded(parameter, entries)
        super().load_state_dict(state_dict)
        # torch casts state to the parameter's dtype; ours is the masters': take it from the source.
        for parameter, entries in loaded.items():
            for key, value in entries.items():
                self.state[parameter][key] = mine[parameter][key].copy_(value)

    def _check_loaded(self, parameter: nn.Parameter, entries: dict[str, torch.Tensor]) -> None:
        name, mine = self._names[parameter], self.state.get(parameter, {})
        if entries.keys() != mine.keys():
            raise ValueError(
                f"{name}: this rank holds {sorted(mine) or 'no state'}, the state_dict has "
                f"{sorted(entries) or 'none'}; it belongs to another rank or layout"
            )
        for key, value in entries.items():
            if mine[key].shape != value.shape:
                found, wanted = tuple(value.shape), tuple(mine[key].shape)
                raise ValueError(f"{name}: {key}: expected shape {wanted}, got {found}")

    # -- step --------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, owned and sharded. They are always set to none."""
        self.runtime.zero_grad()
        # Not those that are registered now: between forward and backward `fully_shard` has others.
        for parameter in self._names:
            parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all weights from the gradients of the backwards since `zero_grad`. Collective.

        Raises:
            FloatingPointError: a gradient is not finite and `nonfinite="error"`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._moves != self.runtime.moves:
            name = type(self).__name__
            raise RuntimeError(
                f"{name}: the model was moved to another device after {name} was made"
            )
        clock = PhaseClock(self.runtime.device)
        gradients = agree_on_gradients(self.runtime, reuse=True)
        clock.mark("reduce")
        self._warn_spoiled(gradients)
        if gradients.nonfinite:
            self._refuse(gradients, clock)
            return loss
        self.runtime.free_all()
        self.runtime.open_pool()
        if self.qk_clip is not None:
            self.qk_clip.agree(self.runtime.communicator, self.runtime.device)
        # The caller's autocast is for its model.
        with torch.autocast(self.runtime.device.type, enabled=False):
            count = UpdatePass(
                self.runtime,
                self.algorithm,
                self.param_groups,
                self.state,
                gradients,
                self.qk_clip,
                clock,
            ).run()
        if self.publish == "sync":
            self.runtime.wait_for_publish()
        clock.mark("publish")
        self.runtime.traffic.step += 1
        self.last_step = StepReport(count, False, (), clock)
        return loss

    def _warn_spoiled(self, gradients: Gradients) -> None:
        """Name parameters whose last update was not finite, each once."""
        new = [name for name in gradients.spoiled if name not in self._spoiled]
        self._spoiled.update(new)
        if new and (self.runtime.communicator is None or self.runtime.communicator.rank == 0):
            logger.warning(
                "the update of %s was not finite though its gradient was: its weights are left as "
                "they are, and its optimizer state is bad; go back to an earlier checkpoint",
                ", ".join(new),
            )

    def _refuse(self, gradients: Gradients, clock: PhaseClock) -> None:
        names = ", ".join(gradients.nonfinite[:8])
        more = len(gradients.nonfinite) - 8
        text = f"gradients are not finite: {names}" + (f" and {more} more" if more > 0 else "")
        self.last_step = StepReport(0, True, gradients.nonfinite, clock)
        if self.qk_clip is not None:
            self.qk_clip.forget()
        if self.nonfinite == "error":
            raise FloatingPointError(text)
        if self.runtime.communicator is None or self.runtime.communicator.rank == 0:
            logger.warning("step skipped, %s", text)

    # -- reports -----------------------------------------------------------------------------

    def routing(self) -> RoutingReport:
        """Return which parameter takes which route, with owners and effective learning rates."""
        options = {p: g for g in self.param_groups for p in g["params"]}
        places = {p: (name, self._entries.get(p)) for p, name in self._names.items()}
        return routing_report(self.runtime, self.algorithm, places, options)
