"""Whatever a model does with autograd, owners get the gradients that plain autograd gives.

Every case is a model and a script of forwards and backwards, run on owners with two and four ranks,
ZeRO-2 and ZeRO-3, twice in a row, and compared with the same script on one plain process; over the
operators twice before the pool is opened, and twice in it.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import torchtitan_dmuon as dmuon
from tests import worlds
from tests.runtime.autograd_call_cases import Asides
from tests.runtime.autograd_cases import CASES
from tests.runtime.communication import (
    chosen,
    each_communication,
    each_communication_at_length,
    run_world,
)
from tests.runtime.heads import as_lists, as_tensors, full_weights
from tests.runtime.plain import (
    WIDTH,
    Block,
    Run,
    Stack,
    check_at_rest,
    compare_gradients,
    dedicate,
    open_world,
    plain_gradients,
)
from tests.worlds import RankFailed

# Cases that share a world: starting one takes longer than a case.
CHUNKS = [list(CASES)[i : i + 10] for i in range(0, len(CASES), 10)]


def check_cases(names: list[str], shape: tuple[int, int]) -> None:
    mesh = open_world(shape, 8)
    for name in names:
        # A case that hangs or kills its rank is the last one in the captured output.
        print(f"case {name}", file=sys.stderr, flush=True)
        try:
            check_case(name, mesh)
        except Exception as error:
            raise AssertionError(f"case {name}: {error}") from error


def check_case(name: str, mesh: DeviceMesh) -> None:
    case = CASES[name]
    size, rank = mesh.size(), torch.distributed.get_rank()
    for reshard in (True, False):
        torch.manual_seed(0)
        model = case.build()
        dedicate(model, mesh, reshard_after_forward=reshard, **case.options)
        optimizer = dmuon.Muon(model)
        for round in range(2 if chosen() == "c10d" else 4):
            if round == 2:
                # What a step does; without its update the weights stay those of the plain copy.
                optimizer.runtime.free_all()
                optimizer.runtime.open_pool()
            where = f"{name}, {'ZeRO-3' if reshard else 'ZeRO-2'}, round {round}, rank {rank}"
            plain = plain_gradients(case.build, case.script, size, round)
            case.script(Run(model, rank, True, round))
            compare_gradients(model, plain, where)
            check_at_rest(model, where)
            optimizer.zero_grad()
        optimizer.runtime.communicator.close()


def hidden_path(reshard: bool) -> str:
    """A loss that reaches a layer's weights after its output and beside it."""
    mesh = open_world((1, 2), 8)

    def script(run: Run) -> None:
        y = run.model(run.x())
        (y.sum() + sum(layer.aside for layer in run.model.layers)).backward()

    def build() -> nn.Module:
        return Asides(True)

    torch.manual_seed(0)
    model = build()
    dedicate(model, mesh, reshard_after_forward=reshard)
    rank = torch.distributed.get_rank()
    try:
        script(Run(model, rank, True))
        compare_gradients(model, plain_gradients(build, script, 2, 0), "hidden path")
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.timeout(60, func_only=True)
@pytest.mark.parametrize("reshard", [True, False], ids=["zero3", "zero2"])
def test_a_loss_beside_the_output_is_right_or_an_error(reshard: bool) -> None:
    answers = run_world(2, hidden_path, reshard, timeout_seconds=20)
    assert len({bool(answer) for answer in answers}) == 1, answers
    assert reshard or answers == ["", ""], "kept layers need no gather"


def reentrant() -> str:
    mesh = open_world((1, 2), 8)
    model = Stack()
    dedicate(model, mesh)
    x = torch.randn(4, WIDTH, requires_grad=True)
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=True)
    try:
        x.sum().backward()
    except NotImplementedError as error:
        message = str(error)
    # The next step works.
    model(torch.randn(4, WIDTH)).sum().backward()
    dmuon.clip_grad_norm_(model, 1.0)
    return message


@pytest.mark.timeout(60, func_only=True)
def test_reentrant_checkpoints_are_refused_with_what_to_use() -> None:
    for message in run_world(2, reentrant, timeout_seconds=20):
        assert "use_reentrant=False" in message and "layers.2" in message


def nested_boundaries() -> None:
    dmuon.dedicate_params(
        Stack(),
        open_world((1, 2)),
        hook_boundary_predicate=lambda n, m: isinstance(m, Block) or n.endswith(".down"),
    )


@pytest.mark.timeout(60, func_only=True)
def test_layers_inside_layers_are_refused_by_name() -> None:
    with pytest.raises(RankFailed, match=r"ValueError: .*layers\.0\.down inside layers\.0"):
        run_world(2, nested_boundaries, timeout_seconds=20)


def unfreeze(shape: tuple[int, int]) -> dict[str, list[Any]]:
    mesh = open_world(shape) if shape != (1, 1) else None
    torch.manual_seed(0)
    model = Stack()
    late = [p for n, p in model.named_parameters() if n.startswith("layers.1.")]
    for parameter in late:
        parameter.requires_grad_(False)
    dedicate(model, mesh)
    optimizer = dmuon.Muon(model, lr=0.02, ns_dtype=torch.float32)
    start = full_weights(model)
    for step in range(4):
        if step == 2:
            same = full_weights(model)
            frozen = [n for n in start if torch.equal(start[n], same[n])]
            assert all(n.startswith("layers.1.") for n in frozen) and len(frozen) == len(late)
            for parameter in late:
                parameter.requires_grad_(True)
            optimizer.add_param_group({"params": late, "lr": 0.01, "adamw_lr": 0.001})
        optimizer.zero_grad()
        model(Run(model, 0, True, step).x()).pow(2).mean().backward()
        optimizer.step()
    now = full_weights(model)
    assert not any(torch.equal(start[n], now[n]) for n in now)
    return as_lists(now)


@each_communication_at_length
@pytest.mark.timeout(60, func_only=True)
def test_unfrozen_parameters_train_once_they_are_added_to_the_optimizer() -> None:
    alone = as_tensors(run_world(1, unfreeze, (1, 1))[0])
    for lists in run_world(2, unfreeze, (1, 2), timeout_seconds=30):
        for name, weight in as_tensors(lists).items():
            torch.testing.assert_close(weight, alone[name], rtol=1e-5, atol=1e-6, msg=name)


def freeze_midway(shape: tuple[int, int], defer: bool) -> dict[str, list[Any]]:
    mesh = open_world(shape) if shape != (1, 1) else None
    torch.manual_seed(0)
    model = Stack()
    dedicate(model, mesh)
    optimizer = dmuon.Muon(model, lr=0.02, ns_dtype=torch.float32)
    late = [p for n, p in model.named_parameters() if n.startswith("layers.1.")]
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(3):
            # One of its parameters at first, then the whole layer.
            for parameter in late[: 1 if step == 1 else None]:
                parameter.requires_grad_(micro < 2)
            with dmuon.no_sync(model) if defer and micro < 2 else nullcontext():
                model(Run(model, 0, True, 3 * step + micro).x()).pow(2).mean().backward()
        optimizer.step()
    return as_lists(full_weights(model))


@each_communication
@pytest.mark.timeout(60, func_only=True)
def test_what_a_parameter_got_before_it_was_frozen_is_summed() -> None:
    """As `.grad` keeps it in one process. Frozen between micro-batches under no_sync."""
    alone = as_tensors(worlds.run_world(1, freeze_midway, (1, 1), False)[0])
    for shape in ((1, 1), (1, 2), (2, 1)):
        for lists in run_world(shape[0] * shape[1], freeze_midway, shape, True, timeout_seconds=30):
            for name, weight in as_tensors(lists).items():
                torch.testing.assert_close(weight, alone[name], rtol=1e-5, atol=1e-6, msg=name)


# Every case on two ranks, every second chunk on four too, unless there is time for all.
PLACED = [
    pytest.param(
        names,
        shape,
        id=f"{names[0]}-to-{names[-1]}-{kind}",
        marks=[pytest.mark.long] if kind == "hsdp" and i % 2 else [],
    )
    for kind, shape in (("fsdp", (1, 2)), ("hsdp", (2, 2)))
    for i, names in enumerate(CHUNKS)
]


@each_communication_at_length
@pytest.mark.timeout(60, func_only=True)
@pytest.mark.parametrize(("names", "shape"), PLACED)
def test_gradients_are_those_of_plain_autograd(names: list[str], shape: tuple[int, int]) -> None:
    run_world(shape[0] * shape[1], check_cases, names, shape, timeout_seconds=55)
