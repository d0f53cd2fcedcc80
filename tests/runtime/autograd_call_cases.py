"""Cases of calls: how often, what comes out, and whether a backward follows."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

import torchtitan_dmuon as dmuon
from tests.runtime.autograd_case import CASES, Case, case, loss_of
from tests.runtime.autograd_parameter_cases import Branches
from tests.runtime.plain import WIDTH, Block, Decoder, Run, Stack

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
