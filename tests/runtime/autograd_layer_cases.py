"""Cases of layers: recomputed, raising, and where they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.nn as nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.runtime.autograd_call_cases import Twice
from tests.runtime.autograd_case import CASES, Case, case, groups_of, loss_of
from tests.runtime.plain import WIDTH, Block, Run, Stack

# -- activation recomputation ---------------------------------------------------------------------


class Recomputed(Stack):
    def __init__(self, how: str) -> None:
        super().__init__(4)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "pairs":
            for k in range(0, len(self.layers), 2):
                x = checkpoint(self._pair, k, x, use_reentrant=False)
            return x
        for index, layer in enumerate(self.layers):
            if self.how == "full" or (self.how == "every_other" and index % 2):
                x = checkpoint(layer, x, use_reentrant=False)
            elif self.how == "selective":
                x = checkpoint(layer, x, use_reentrant=False, context_fn=_save_matmuls)
            elif self.how == "no_early_stop":
                with torch.utils.checkpoint.set_checkpoint_early_stop(False):
                    x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return x

    def _pair(self, k: int, x: torch.Tensor) -> torch.Tensor:
        return self.layers[k + 1](self.layers[k](x))


def _save_matmuls() -> Any:
    saved = 0

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal saved
        if op == torch.ops.aten.addmm.default:
            saved += 1
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _recomputed(how: str, **options: Any) -> None:
    def script(run: Run) -> None:
        loss_of(run.model(run.x().requires_grad_())).backward()
        loss_of(run.model(run.x(1))).backward()

    suffix = "".join(f"_{key}_{value}" for key, value in options.items())
    CASES[f"recomputed_{how}{suffix}"] = Case(lambda: Recomputed(how), script, options)


for _how in ("full", "every_other", "selective", "no_early_stop", "pairs"):
    _recomputed(_how)
_recomputed("pairs", prefetch_depth=0)
_recomputed("full", prefetch_depth=0)


@case(Stack)
def recomputed_model(run: Run) -> None:
    loss_of(checkpoint(run.model, run.x(), use_reentrant=False)).backward()


@case(Twice)
def recomputed_model_with_layers_called_twice(run: Run) -> None:
    loss_of(checkpoint(run.model, run.x(), use_reentrant=False)).backward()


class RecomputedInside(nn.Module):
    """Recomputes parts of itself, beneath the layer's own call."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False) + x


class InsideStack(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(RecomputedInside() for _ in range(3))


@case(InsideStack)
def recomputed_inside_the_layers(run: Run) -> None:
    loss_of(run.model(run.x())).backward()


# -- exceptions -----------------------------------------------------------------------------------


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FragileBlock() for _ in range(4))
        self.catch = False

    def forward(self, x: torch.Tensor, fail: int = -1) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if not self.catch:
                x = layer(x, fail == index)
                continue
            with suppress(ZeroDivisionError):
                x = layer(x, fail == index)
        return x


class FragileBlock(Block):
    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        y = super().forward(x)
        if fail:
            raise ZeroDivisionError("on purpose")
        return y


@case(Fragile)
def exception_in_a_forward_and_on(run: Run) -> None:
    try:
        run.model(run.x(3), fail=2)
    except ZeroDivisionError:
        pass
    else:
        raise AssertionError("nothing was raised")
    loss_of(run.model(run.x())).backward()


@case(Fragile)
def exception_caught_by_the_model(run: Run) -> None:
    run.model.catch = True
    loss_of(run.model(run.x(), fail=2)).backward()
    loss_of(run.model(run.x())).backward()


@case(Stack)
def exception_in_a_backward_and_on(run: Run) -> None:
    before = {
        n: None if p.grad is None else p.grad.clone() for n, p in run.model.named_parameters()
    }
    y = run.model.layers[0](run.x().requires_grad_())

    def explode(_: torch.Tensor) -> None:
        raise ZeroDivisionError("on purpose")

    y.register_hook(explode)
    z = run.model.layers[2](run.model.layers[1](y))
    try:
        loss_of(z).backward()
    except ZeroDivisionError:
        pass
    else:
        raise AssertionError("nothing was raised")
    # A loop that goes on forgets what the aborted backward left.
    if run.owned:
        run.model._dmuon_site.runtime.zero_grad()
    for name, p in run.model.named_parameters():
        p.grad = before[name]
    loss_of(run.model(run.x())).backward()


# -- layers without a model call, and where layers are --------------------------------------------


@case(Stack)
def layers_called_from_outside(run: Run) -> None:
    x = run.x()
    for layer in run.model.layers:
        x = layer(x)
    loss_of(x).backward()


class InDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(k): Block() for k in range(3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Module()
        self.backbone.encoder = Stack(2)
        self.backbone.decoder = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.backbone.decoder(self.backbone.encoder(x))


class Towers(nn.Module):
    """Two stacks of different layers, and layers inside layers."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(Block() for _ in range(2))
        self.right = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in self.left:
            x = layer(x)
        for pair in self.right:
            for layer in pair:
                y = layer(y)
        return x * y


class NoContainer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def _placed(name: str, build: Callable[[], nn.Module], layers: int, **options: Any) -> None:
    def script(run: Run) -> None:
        assert not run.owned or len(groups_of(run)) == layers, [g.name for g in groups_of(run)]
        loss_of(run.model(run.x())).backward()

    CASES[name] = Case(build, script, options)


_placed("layers_in_module_dict", InDict, 3)
_placed("layers_in_sequential", lambda: nn.Sequential(*(Block() for _ in range(3))), 3)
_placed("layers_nested", Nested, 4)
_placed("layers_in_two_towers", Towers, 6)
_placed("no_container", NoContainer, 2)
_placed("single_module", lambda: nn.Linear(WIDTH, WIDTH), 1)
_placed("single_block", Block, 3, predicate=lambda n, p: p.ndim == 2)
_placed(
    "layers_by_predicate",
    Stack,
    6,
    hook_boundary_predicate=lambda n, m: n.endswith((".up", ".down")),
    predicate=lambda n, p: p.ndim == 2,
)
_placed("model_is_the_layer", Stack, 1, hook_boundary_predicate=lambda n, m: n == "")
