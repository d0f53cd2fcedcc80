"""A bad gradient costs one step, a missing one nothing; ranks always agree."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn as nn

import torchtitan_dmuon as dmuon
from tests.runtime.communication import each_communication_at_length, run_world
from tests.runtime.heads import (
    DECAY,
    LR,
    MOMENTUM,
    Heads,
    Textbook,
    batch,
    full_weights,
    mean_gradient,
    optimizer_state,
    relative,
)
from tests.runtime.plain import Decoder, Run, dedicate, open_world

WORLDS = [(1, 1), (1, 2), (1, 4), (2, 2)]
NAMES = ["x".join(map(str, world)) for world in WORLDS]
TARGETS = {
    "matrix": "layers.1.up.weight",
    "owned vector": "layers.0.norm.weight",
    "sharded": "head.weight",
}


def start(mesh: Any, **options: Any) -> tuple[nn.Module, dmuon.Muon]:
    torch.manual_seed(0)
    model = Decoder()
    dedicate(model, mesh)
    return model, dmuon.Muon(model, lr=0.02, ns_dtype=torch.float32, **options)


class Spoil(torch.autograd.Function):
    """Passes its input through, and adds a bad value to the gradient of a weight."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, weight: torch.Tensor, value: float) -> torch.Tensor:
        ctx.shape, ctx.value = weight.shape, value
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        bad = gradient.new_zeros(ctx.shape)
        bad.view(-1)[1] = ctx.value
        return gradient, bad, None


def spoil(model: nn.Module, target: str, value: float) -> Any:
    """Put `value` into one element of the gradient of a parameter, on this rank."""

    def change(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[1] = value
        return gradient

    if target == "sharded":
        # The parameter that autograd sees belongs to fully_shard: spoil what its gradient is of.
        return model.head.register_forward_hook(
            lambda module, args, out: Spoil.apply(out, module.weight, value)
        )
    module, attribute = {
        "matrix": (model.layers[1].up, "weight"),
        "owned vector": (model.layers[0].norm, "weight"),
    }[target]
    return getattr(module, attribute).register_hook(change)


def one_step(
    model: nn.Module, optimizer: dmuon.Muon, rank: int, step: int, *, clip: bool = True
) -> None:
    optimizer.zero_grad()
    out = model(Run(model, rank, True, step).tokens())
    (out * out.roll(1, -1)).sum().backward()
    if clip:
        dmuon.clip_grad_norm_(model, 1.0)
    optimizer.step()


def everything(model: nn.Module, optimizer: dmuon.Muon) -> list[torch.Tensor]:
    return [*full_weights(model).values(), *optimizer_state(optimizer)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def skip_step(shape: tuple[int, int], targets: list[str]) -> list[tuple[str, ...]]:
    mesh = open_world(shape) if shape != (1, 1) else None
    rank, last = (torch.distributed.get_rank() if mesh else 0), shape[0] * shape[1] - 1
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logging.getLogger("torchtitan_dmuon").addHandler(Keep())
    model, optimizer = start(mesh)
    for step in (1, 2, 4, 5):
        one_step(model, optimizer, rank, step)
    without = everything(model, optimizer)

    reports = []
    for target in targets:
        messages.clear()
        model, optimizer = start(mesh)
        for step in (1, 2):
            one_step(model, optimizer, rank, step)
        before = everything(model, optimizer)
        handle = spoil(model, target, float("inf")) if rank == last else None
        one_step(model, optimizer, rank, 3, clip=target != "matrix")
        report = optimizer.last_step
        assert report.skipped and report.orthogonalized == 0, target
        assert same(before, everything(model, optimizer)), f"{target}: the skipped step left traces"
        if handle is not None:
            handle.remove()
        for step in (4, 5):
            one_step(model, optimizer, rank, step)
            assert not optimizer.last_step.skipped
        assert same(without, everything(model, optimizer)), f"{target}: later steps differ"
        assert len(messages) == (rank == 0), messages
        assert rank or TARGETS[target] in messages[0]
        reports.append(report.nonfinite)
    return reports


@each_communication_at_length
@pytest.mark.timeout(60, func_only=True)
@pytest.mark.parametrize("world", WORLDS, ids=NAMES)
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(world: tuple[int, int]) -> None:
    targets = list(TARGETS)
    for reports in run_world(world[0] * world[1], skip_step, world, targets, timeout_seconds=55):
        assert reports == [(TARGETS[t],) for t in targets]


def raise_error(shape: tuple[int, int]) -> list[str]:
    mesh = open_world(shape)
    rank = torch.distributed.get_rank()
    model, optimizer = start(mesh, nonfinite="error")
    one_step(model, optimizer, rank, 1)
    before = everything(model, optimizer)
    handle = spoil(model, "matrix", float("nan")) if rank == 1 else None
    texts = []
    try:
        one_step(model, optimizer, rank, 2, clip=False)
    except FloatingPointError as error:
        texts.append(str(error))
    assert same(before, everything(model, optimizer))
    try:
        dmuon.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    except FloatingPointError as error:
        texts.append(str(error))
    norm = dmuon.clip_grad_norm_(model, 1.0)
    assert not torch.isfinite(norm)
    if handle is not None:
        handle.remove()
    one_step(model, optimizer, rank, 3)
    assert not optimizer.last_step.skipped
    assert not same(before, everything(model, optimizer))
    return texts


@each_communication_at_length
@pytest.mark.timeout(60, func_only=True)
def test_policy_error_raises_on_all_ranks_and_training_can_go_on() -> None:
    for texts in run_world(4, raise_error, (2, 2), timeout_seconds=55):
        assert len(texts) == 2 and all(TARGETS["matrix"] in text for text in texts)


HEADS = [(6, 9), (9, 6), (8, 8), (5, 12), (7, 7)]


def miss_gradient(shape: tuple[int, int]) -> None:
    mesh = open_world(shape) if shape != (1, 1) else None
    rank, size = (torch.distributed.get_rank() if mesh else 0), shape[0] * shape[1]
    torch.manual_seed(0)
    model = Heads(HEADS)
    model.layers[4].weight.requires_grad_(False)
    books = [Textbook(layer.weight) for layer in model.layers]
    owned = dedicate(model, mesh, small_matrix_numel=1)
    optimizer = dmuon.Muon(
        model, lr=LR, weight_decay=DECAY, momentum=MOMENTUM, ns_dtype=torch.float32
    )
    owned.runtime.traffic.keep = True
    before, state = full_weights(model), optimizer_state(optimizer)
    for step in range(4):
        used = [0, 1, 3, 4] if step % 2 else [0, 1, 2, 3, 4]
        optimizer.zero_grad()
        model(batch(HEADS, rank, step), used).backward()
        optimizer.step()
        after = full_weights(model)
        for index, book in enumerate(books):
            name = f"layers.{index}.weight"
            if index not in used or index == 4:
                assert torch.equal(before[name], after[name]), f"{name} moved in step {step}"
                continue
            old = book.weight
            book.step(mean_gradient(HEADS, index, size, step))
            assert relative(after[name] - before[name], book.weight - old) < 1e-4, (name, step)
        if step % 2:
            assert _momenta(optimizer, model.layers[2].weight, state), "momentum moved"
        before, state = after, optimizer_state(optimizer)
    reduced = {r.label for r in owned.runtime.traffic.records if r.operation == "reduce"}
    assert size == 1 or reduced == {f"layers.{i}" for i in range(4)}, "frozen ones cost nothing"


def _momenta(optimizer: dmuon.Muon, parameter: nn.Parameter, before: list[torch.Tensor]) -> bool:
    now = optimizer.state.get(parameter, {}).values()
    return all(any(torch.equal(value, old) for old in before) for value in now)


@each_communication_at_length
@pytest.mark.timeout(60, func_only=True)
@pytest.mark.parametrize("world", [(1, 1), (1, 2), (1, 3), (2, 2)])
def test_a_matrix_without_gradient_is_left_alone(world: tuple[int, int]) -> None:
    run_world(world[0] * world[1], miss_gradient, world, timeout_seconds=50)


class Wide(nn.Module):
    """One layer whose matrix and head are normed in several parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(257, 301, bias=False)])
        self.head = nn.Linear(301, 211, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[0](x))


def _norm_of(scale: float, bad: tuple[str, int, float] | None = None) -> tuple[Any, Any]:
    """Return `clip_grad_norm_`'s norm, and the one from all gradients in float64."""
    torch.manual_seed(0)
    model = Wide()
    dmuon.dedicate_params(model, None, cost="model", small_matrix_numel=1)
    parameters = dict(model.named_parameters())
    gradients = {name: torch.randn(p.shape) * scale for name, p in parameters.items()}
    if bad is not None:
        name, element, value = bad
        gradients[name].view(-1)[element] = value
    x = torch.zeros(1, 257)
    out = model(x).sum()
    for name, gradient in gradients.items():
        parameters[name].register_hook(lambda _, g=gradient: g.clone())
    out.backward()
    exact = torch.cat([g.double().view(-1) for g in gradients.values()]).norm()
    return dmuon.clip_grad_norm_(model, float("inf")), exact


@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e34])
def test_the_norm_of_large_matrices_is_float64s(scale: float) -> None:
    """Squares of the smallest and largest of these leave float32."""
    found, exact = _norm_of(scale)
    assert float(found) == float(exact.float())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("element", [0, 40_000, -1], ids=["first", "middle", "last"])
@pytest.mark.parametrize("name", ["layers.0.weight", "head.weight"])
def test_a_bad_value_anywhere_in_a_large_matrix_is_found(
    name: str, element: int, value: float
) -> None:
    found, _ = _norm_of(1.0, (name, element, value))
    assert not torch.isfinite(found)
