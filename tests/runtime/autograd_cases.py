"""Models and scripts for `test_autograd_shapes`; see `plain.py` for what a script is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torchtitan_dmuon as dmuon
from tests.runtime.plain import WIDTH, Block, Decoder, Run, Stack

Script = Callable[[Run], None]


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    script: Script
    options: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {}


def case(build: Callable[[], nn.Module], **options: Any) -> Callable[[Script], Script]:
    def add(script: Script) -> Script:
        CASES[script.__name__] = Case(build, script, options)
        return script

    return add


def loss_of(output: torch.Tensor, k: int = 0) -> torch.Tensor:
    return (output * output.roll(1 + k, -1)).sum() + output.sum()


# -- usual models ------------------------------------------------------------------------------


@case(Decoder)
def decoder(run: Run) -> None:
    loss_of(run.model(run.tokens())).backward()


@case(Stack)
def input_without_grad(run: Run) -> None:
    loss_of(run.model(run.x())).backward()


@case(Stack)
def input_with_grad(run: Run) -> None:
    x = run.x().requires_grad_()
    loss_of(run.model(x)).backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


@case(Stack, prefetch_depth=0)
def no_prefetch(run: Run) -> None:
    loss_of(run.model(run.x())).backward()


@case(lambda: Stack(5), prefetch_depth=4)
def deep_prefetch(run: Run) -> None:
    loss_of(run.model(run.x())).backward()


# -- parameters without gradients ---------------------------------------------------------------


class Spare(nn.Module):
    """Has a matrix and a vector that nothing uses; the third is used if it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, branch: bool = False) -> torch.Tensor:
        y = torch.tanh(self.used(x))
        return self.sometimes(y) if branch else y


class Spares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Spare() for _ in range(3))

    def forward(self, x: torch.Tensor, branch: bool = False) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, branch)
        return x


@case(Spares)
def unused_parameters(run: Run) -> None:
    loss_of(run.model(run.x())).backward()


@case(Spares)
def parameters_used_on_one_rank(run: Run) -> None:
    loss_of(run.model(run.x(), branch=run.rank == 1)).backward()


class Branches(nn.Module):
    """Layers that pass their input through or cut the gradient, as they are told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Branch() for _ in range(4))

    def forward(self, x: torch.Tensor, kinds: str) -> torch.Tensor:
        for layer, kind in zip(self.layers, kinds, strict=True):
            x = layer(x, kind)
        return x


class Branch(Block):
    def forward(self, x: torch.Tensor, kind: str = "u") -> torch.Tensor:
        if kind == "p":  # pass
            return x
        y = super().forward(x)
        return y.detach() if kind == "d" else y


@case(Branches)
def layer_passed_on_all_ranks(run: Run) -> None:
    loss_of(run.model(run.x().requires_grad_(), "upuu")).backward()


@case(Branches)
def layer_passed_on_one_rank(run: Run) -> None:
    loss_of(run.model(run.x().requires_grad_(), "upuu" if run.rank == 0 else "uuuu")).backward()


@case(Branches)
def last_layers_passed_on_one_rank(run: Run) -> None:
    loss_of(run.model(run.x().requires_grad_(), "uupp" if run.rank == 1 else "uuuu")).backward()


@case(Branches)
def first_layers_passed_on_one_rank_without_input_grad(run: Run) -> None:
    loss_of(run.model(run.x(), "ppuu" if run.rank == 1 else "uuuu")).backward()


@case(Branches)
def gradient_cut_on_one_rank(run: Run) -> None:
    loss_of(run.model(run.x(), "uduu" if run.rank == 1 else "uuuu")).backward()


class Skips(Stack):
    """Does not even call the layers that it is told to leave out."""

    def __init__(self) -> None:
        super().__init__(5)

    def forward(self, x: torch.Tensor, skip: tuple[int, ...] = ()) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index not in skip:
                x = layer(x)
        return x


@case(Skips)
def layers_not_called_on_any_rank(run: Run) -> None:
    loss_of(run.model(run.x(), skip=(1, 2))).backward()


@case(Skips)
def layer_never_called_then_called(run: Run) -> None:
    loss_of(run.model(run.x(), skip=(3,) if run.round == 0 else (0, 4))).backward()


@case(Skips)
def layers_not_called_on_one_rank(run: Run) -> None:
    loss_of(run.model(run.x(), skip=())).backward()
    loss_of(run.model(run.x(1), skip=(1, 2) if run.rank == 1 else ())).backward()


@case(Skips)
def last_layer_not_called_on_one_rank(run: Run) -> None:
    loss_of(run.model(run.x(), skip=(4,) if run.rank == 1 else ())).backward()


# -- frozen -------------------------------------------------------------------------------------


def frozen_stack(*names: str) -> nn.Module:
    model = Stack(4)
    for name, parameter in model.named_parameters():
        if any(part in name for part in names):
            parameter.requires_grad_(False)
    return model


@case(lambda: frozen_stack("up.weight", "norm"))
def frozen_parameters(run: Run) -> None:
    loss_of(run.model(run.x())).backward()


@case(lambda: frozen_stack("layers.0.", "layers.1."))
def frozen_first_layers(run: Run) -> None:
    loss_of(run.model(run.x())).backward()


@case(lambda: frozen_stack("layers.2.", "layers.3."))
def frozen_last_layers(run: Run) -> None:
    loss_of(run.model(run.x())).backward()


@case(lambda: frozen_stack("layers.1.", "layers.2."))
def frozen_middle_layers_with_input_grad(run: Run) -> None:
    x = run.x().requires_grad_()
    loss_of(run.model(x)).backward()
    assert x.grad is not None


# -- shared -------------------------------------------------------------------------------------


class SharedInside(nn.Module):
    """Two Linear modules of one layer hold one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self._layer() for _ in range(2))

    @staticmethod
    def _layer() -> nn.Module:
        layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        layer[2].weight = layer[0].weight
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@case(SharedInside, hook_boundary_predicate=lambda n, m: n.count(".") == 1)
def weight_shared_inside_a_layer(run: Run) -> None:
    loss_of(run.model(run.x())).backward()


def shared_across() -> nn.Module:
    model = Stack(4)
    model.layers[2].up.weight = model.layers[0].up.weight
    model.layers[3].down = model.layers[1].down
    return model


@case(shared_across)
def weights_shared_by_layers(run: Run) -> None:
    loss_of(run.model(run.x())).backward()


class TiedOutside(nn.Module):
    """The first layer's projection is also used as a head outside the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.layers[0].up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@case(TiedOutside)
def weight_tied_with_something_outside(run: Run) -> None:
    names = {e.name for g in _groups(run) for e in g.parameters}
    assert not run.owned or ("layers.1.up.weight" in names and "layers.0.up.weight" not in names)
    loss_of(run.model(run.x())).backward()


def _groups(run: Run) -> Any:
    return run.model._dmuon_site.runtime.groups if run.owned else ()


# -- calls --------------------------------------------------------------------------------------


class Twice(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (0, 1, 1, 2, 0):
            x = self.layers[index](x)
        return x


@case(Twice)
def layers_called_twice(run: Run) -> None:
    loss_of(run.model(run.x())).backward()


@case(Stack)
def two_forwards_one_backward(run: Run) -> None:
    a, b = run.model(run.x(0)), run.model(run.x(1))
    (loss_of(a) + loss_of(b, 1)).backward()


@case(Stack)
def two_forwards_two_backwards(run: Run) -> None:
    a, b = run.model(run.x(0)), run.model(run.x(1))
    loss_of(a).backward()
    loss_of(b).backward()


@case(Stack)
def two_forwards_two_backwards_in_reverse(run: Run) -> None:
    a, b = run.model(run.x(0)), run.model(run.x(1))
    loss_of(b).backward()
    loss_of(a).backward()


@case(Branches)
def two_forwards_one_backward_cut_on_one_rank(run: Run) -> None:
    kinds = "udud" if run.rank == 1 else "uuuu"
    a, b = run.model(run.x(0), kinds), run.model(run.x(1), "uuuu")
    (loss_of(b, 1) + (loss_of(a) if a.requires_grad else 0)).backward()


@case(Decoder)
def decoder_accumulates(run: Run) -> None:
    loss_of(run.model(run.tokens(0))).backward()
    loss_of(run.model(run.tokens(1))).backward()


@case(Decoder)
def decoder_accumulates_without_sync(run: Run) -> None:
    if run.owned:
        with dmuon.no_sync(run.model):
            loss_of(run.model(run.tokens(0))).backward()
            loss_of(run.model(run.tokens(1))).backward()
    else:
        loss_of(run.model(run.tokens(0))).backward()
        loss_of(run.model(run.tokens(1))).backward()
    loss_of(run.model(run.tokens(2))).backward()


@case(Branches)
def backward_without_sync_left_out_by_one_rank(run: Run) -> None:
    with dmuon.no_sync(run.model) if run.owned else nullcontext():
        y = run.model(run.x(0), "uuuu")
        if run.rank == 0:
            loss_of(y).backward()
        elif run.owned:
            dmuon.skip_backward(run.model)
        loss_of(run.model(run.x(2), "upuu")).backward()
    loss_of(run.model(run.x(1), "uuuu")).backward()


# -- outputs ------------------------------------------------------------------------------------


@dataclass
class Result:
    hidden: torch.Tensor
    extra: torch.Tensor


class Shaped(nn.Module):
    """A layer that takes and gives one tensor in some container, and one by keyword."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block, self.kind = Block(), kind

    def forward(self, x: Any, *, shift: torch.Tensor) -> Any:
        inner = {
            "dict": lambda: x["hidden"],
            "tuple": lambda: x[0],
            "nested": lambda: x[1]["hidden"][0],
            "dataclass": lambda: x.hidden,
        }[self.kind]()
        y = self.block(inner + shift)
        return pack(self.kind, y, inner.sum())


def pack(kind: str, y: torch.Tensor, extra: torch.Tensor) -> Any:
    return {
        "dict": lambda: {"hidden": y, "extra": extra},
        "tuple": lambda: (y, extra, None, "text"),
        "nested": lambda: [3, {"hidden": (y, extra)}],
        "dataclass": lambda: Result(y, extra),
    }[kind]()


class ShapedStack(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers, self.kind = nn.ModuleList(Shaped(kind) for _ in range(3)), kind

    def forward(self, x: torch.Tensor) -> Any:
        value = pack(self.kind, x, x.sum())
        for layer in self.layers:
            value = layer(value, shift=torch.ones(()))
        return value


def _shaped(kind: str, name: str) -> None:
    def script(run: Run) -> None:
        value = run.model(run.x())
        hidden = {
            "dict": lambda: value["hidden"],
            "tuple": lambda: value[0],
            "nested": lambda: value[1]["hidden"][0],
            "dataclass": lambda: value.hidden,
        }[kind]()
        loss_of(hidden).backward()

    CASES[name] = Case(lambda: ShapedStack(kind), script)


for _kind in ("dict", "tuple", "nested", "dataclass"):
    _shaped(_kind, f"outputs_as_{_kind}")


class Aside(nn.Module):
    """Keeps an auxiliary loss on itself that its outputs do not show, made before or after them."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.block, self.gate, self.late = Block(), nn.Linear(WIDTH, WIDTH), late
        self.aside = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.late:
            self.aside = torch.tanh(self.gate(x)).pow(2).sum()
        y = self.block(x)
        if self.late:
            self.aside = torch.tanh(self.gate(torch.tanh(y))).pow(2).sum()
        return y


class Asides(nn.Module):
    def __init__(self, late: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Aside(late) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@case(lambda: Asides(False))
def auxiliary_loss_beside_the_output(run: Run) -> None:
    y = run.model(run.x())
    (loss_of(y) + sum(layer.aside for layer in run.model.layers)).backward()


# -- forwards that no backward follows -----------------------------------------------------------


@case(Decoder)
def evaluation_between_steps(run: Run) -> None:
    run.model.eval()
    with torch.no_grad():
        run.model(run.tokens(5))
    with torch.inference_mode():
        run.model(run.tokens(5))
    run.model(run.tokens(6))
    run.model.train()
    loss_of(run.model(run.tokens(0))).backward()


@case(Decoder)
def evaluation_between_forward_and_backward(run: Run) -> None:
    loss = loss_of(run.model(run.tokens(0)))
    with torch.no_grad():
        run.model(run.tokens(5))
    with torch.inference_mode():
        run.model(run.tokens(5))
    loss.backward()


@case(Stack)
def inference_first(run: Run) -> None:
    with torch.inference_mode():
        first = run.model(run.x(5))
    assert torch.isfinite(first).all()
    loss_of(run.model(run.x(0))).backward()


@case(Stack)
def backward_in_eval_mode(run: Run) -> None:
    run.model.eval()
    loss_of(run.model(run.x())).backward()
    run.model.train()


@case(Stack)
def retain_graph_and_backward_twice(run: Run) -> None:
    loss = loss_of(run.model(run.x()))
    loss.backward(retain_graph=True)
    loss.backward()


@case(Stack)
def two_losses_of_one_forward(run: Run) -> None:
    y = run.model(run.x())
    loss_of(y).backward(retain_graph=True)
    loss_of(y, 2).backward()


# -- ranks that leave out a backward ---------------------------------------------------------------


@case(Stack)
def last_backward_left_out_by_one_rank(run: Run) -> None:
    loss_of(run.model(run.x(0))).backward()
    y = run.model(run.x(1))
    if run.rank != 1:
        loss_of(y).backward()


@case(Stack)
def earlier_backward_left_out_by_one_rank(run: Run) -> None:
    y = run.model(run.x(0))
    if run.rank != 1:
        loss_of(y).backward()
    elif run.owned:
        dmuon.skip_backward(run.model)
    loss_of(run.model(run.x(1))).backward()


@case(Stack)
def only_one_rank_runs_backward(run: Run) -> None:
    y = run.model(run.x(0))
    if run.rank == 1:
        loss_of(y).backward()


@case(Decoder)
def decoder_backward_left_out_by_one_rank(run: Run) -> None:
    loss_of(run.model(run.tokens(0))).backward()
    y = run.model(run.tokens(1))
    if run.rank != 1:
        loss_of(y).backward()


@case(Stack)
def backward_left_out_by_all_ranks(run: Run) -> None:
    run.model(run.x(0))
    loss_of(run.model(run.x(1))).backward()


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
        assert not run.owned or len(_groups(run)) == layers, [g.name for g in _groups(run)]
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
