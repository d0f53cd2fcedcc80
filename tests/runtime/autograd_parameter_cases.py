"""Cases of parameters: without gradients, frozen, shared."""

from __future__ import annotations

import torch
import torch.nn as nn

from tests.runtime.autograd_case import case, groups_of, loss_of
from tests.runtime.plain import WIDTH, Block, Decoder, Run, Stack

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
    names = {e.name for g in groups_of(run) for e in g.parameters}
    assert not run.owned or ("layers.1.up.weight" in names and "layers.0.up.weight" not in names)
    loss_of(run.model(run.x())).backward()
