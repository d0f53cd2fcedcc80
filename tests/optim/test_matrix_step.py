"""What the runtime does around a matrix optimizer: views, batches, state, guards, names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn as nn

import torchtitan_dmuon as dmuon
from tests.runtime.heads import Heads, as_lists, batch, full_weights, mean_gradient
from tests.runtime.plain import dedicate, open_world
from tests.worlds import run_world
from torchtitan_dmuon.optim import matrix_step, owned_state
from torchtitan_dmuon.optim.algorithms.muon import MuonRule
from torchtitan_dmuon.optim.matrix_optimizer import (
    MatrixOptimizer,
    State,
    find,
    new_state,
    register,
    registered,
)
from torchtitan_dmuon.optim.matrix_step import MatrixWork, batches, update_matrices
from torchtitan_dmuon.ownership import MatrixSpec


@dataclass(frozen=True, kw_only=True)
class Probe(MatrixOptimizer):
    """Keeps state of every kind; the update is the gradient's running mean."""

    spoil: bool = False

    def state_shapes(self, rows: int, columns: int) -> Any:
        return {"mean": "elementwise", "per_row": (rows, 1), "square": (rows, rows), "step": ()}

    def update(self, gradient: torch.Tensor, state: State) -> torch.Tensor:
        assert gradient.ndim == 2 and state["mean"].shape == gradient.shape
        state["step"] += 1
        state["mean"].lerp_(gradient, 0.5)
        state["per_row"] += gradient.sum(1, keepdim=True)
        state["square"] += gradient @ gradient.T
        if self.spoil:
            return torch.full_like(gradient, float("inf"))
        return state["mean"].clone()


class Tiny(nn.Module):
    """A fused interleaved weight, a stack and a plain weight in each of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TinyLayer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class TinyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.randn(12, 6) / 3)
        self.stack = nn.Parameter(torch.randn(5, 6, 6) / 3)
        self.plain = nn.Parameter(torch.randn(6, 12) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(x @ self.fused.T) @ self.plain.T
        return x + torch.tanh(x.unsqueeze(-3) @ self.stack).mean(-3)


SPECS = {"fused": MatrixSpec(rows=(4, 2), blocks=2)}
# Rows of the two matrices that `fused` interleaves.
FUSED_ROWS = [[0, 1, 2, 3, 6, 7, 8, 9], [4, 5, 10, 11]]


def blocks(name: str, value: torch.Tensor) -> list[torch.Tensor]:
    """Return a parameter's matrices."""
    if name.endswith("fused"):
        return [value[rows] for rows in FUSED_ROWS]
    return list(value) if value.ndim == 3 else [value]


def train(shape: tuple[int, int], algorithm: Any, steps: int, **options: Any) -> dict[str, Any]:
    """Train on integer data, whose gradients' sums are exact, and return all weights."""
    mesh = open_world(shape) if shape != (1, 1) else None
    rank = torch.distributed.get_rank() if mesh else 0
    size = shape[0] * shape[1]
    torch.manual_seed(0)
    model = Tiny()
    dedicate(model, mesh, algorithm=algorithm, matrix_specs=SPECS, small_matrix_numel=1)
    optimizer = dmuon.OwnerOptimizer(model, algorithm, lr=0.02, **options)
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(12, 16, 6, generator=torch.Generator().manual_seed(step))
        model(x.tensor_split(size)[rank]).square().mean().backward()
        optimizer.step()
    state = {
        f"{name}/{key}": value.tolist()
        for group in optimizer.param_groups
        for name, p in zip(group["param_names"], group["params"], strict=True)
        for key, value in optimizer.state[p].items()
    }
    return {"weights": as_lists(full_weights(model)), "state": state}


@pytest.mark.parametrize("world", [(1, 1), (2, 2), (3, 1)], ids=str)
def test_a_rule_sees_whole_matrices_and_its_own_state(world: tuple[int, int]) -> None:
    """Interleaved, stacked and plain: the same as a loop over single matrices in one process."""
    torch.manual_seed(0)
    model, rule = Tiny(), Probe(lr=0.02)
    states = {
        (name, i): new_state(rule, *m.shape, device=m.device)
        for name, p in model.named_parameters()
        for i, m in enumerate(blocks(name, p.detach()))
    }
    for step in range(3):
        model.zero_grad()
        x = torch.randn(12, 16, 6, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            with torch.no_grad():
                new = p.detach().clone()
                for i, gradient in enumerate(blocks(name, p.grad)):
                    update = rule.update(gradient, states[name, i])
                    target = FUSED_ROWS[i] if name.endswith("fused") else i
                    if name.endswith("plain"):
                        target = slice(None)
                    new[target] = new[target] * (1 - 0.02 * 0.1) - 0.02 * update
                p.copy_(new)
    if world == (1, 1):
        results = [train(world, Probe, 3)]
    else:
        results = run_world(world[0] * world[1], train, world, Probe, 3, timeout_seconds=60)
    for name, p in model.named_parameters():
        for result in results:
            found = torch.tensor(result["weights"][name])
            torch.testing.assert_close(found, p.detach(), rtol=1e-4, atol=1e-6)
    held = [key for result in results for key in result["state"]]
    assert len(held) == len(set(held)), "state of one matrix is on several ranks"
    merged = {k: v for result in results for k, v in result["state"].items()}
    for (name, i), state in states.items():
        several = len(blocks(name, dict(model.named_parameters())[name].detach())) > 1
        for key in ("per_row", "square", "step"):
            full = f"{name}/{owned_state.name(rule, key)}" + (f".{i}" if several else "")
            found = torch.tensor(merged[full])
            torch.testing.assert_close(found, state[key], rtol=1e-4, atol=1e-5, msg=full)


SHAPES = [(7, 5), (3, 12), (12, 4), (1, 6), (5, 5), (7, 5)]


ALGORITHMS = ("normuon", "soap", "shampoo", "muon")


def train_all_heads(shape: tuple[int, int]) -> dict[str, dict[str, list[Any]]]:
    mesh = open_world(shape) if shape != (1, 1) else None
    return {algorithm: train_heads(mesh, algorithm) for algorithm in ALGORITHMS}


def train_heads(mesh: Any, algorithm: str) -> dict[str, list[Any]]:
    rank = torch.distributed.get_rank() if mesh else 0
    torch.manual_seed(0)
    model = Heads(SHAPES)
    dedicate(model, mesh, algorithm=algorithm, small_matrix_numel=1)
    optimizer = dmuon.OwnerOptimizer(model, algorithm, lr=0.02)
    for step in range(4):
        optimizer.zero_grad()
        model(batch(SHAPES, rank, step), range(len(SHAPES))).backward()
        optimizer.step()
    return as_lists(full_weights(model))


@cache
def heads_outcomes(world: tuple[int, int]) -> list[dict[str, dict[str, list[Any]]]]:
    if world == (1, 1):
        return [train_all_heads(world)]
    return run_world(world[0] * world[1], train_all_heads, world, timeout_seconds=60)


@pytest.mark.parametrize("world", [(1, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_is_one_process_on_whole_gradients(
    algorithm: str, world: tuple[int, int]
) -> None:
    """Integer data, whose sums are exact on any layout: nothing but the rule is left to differ."""
    rule = find(algorithm)(lr=0.02)
    torch.manual_seed(0)
    weights = [layer.weight.detach().clone() for layer in Heads(SHAPES).layers]
    for index, (rows, columns) in enumerate(SHAPES):
        state = new_state(rule, rows, columns, device=weights[index].device)
        for step in range(4):
            gradient = mean_gradient(SHAPES, index, world[0] * world[1], step).float()
            update = rule.update(gradient, state)
            weights[index] *= 1 - 0.02 * rule.weight_decay
            weights[index] -= rule.adjusted_lr(rows, columns) * update
    for result in heads_outcomes(world):
        for index, weight in enumerate(weights):
            found = torch.tensor(result[algorithm][f"layers.{index}.weight"])
            torch.testing.assert_close(found, weight, rtol=1e-5, atol=1e-6, msg=str(SHAPES[index]))


def works(shapes: Sequence[tuple[int, int]], rule: MatrixOptimizer) -> list[MatrixWork]:
    torch.manual_seed(1)
    result = []
    for i, (rows, columns) in enumerate(shapes):
        (matrix,) = MatrixSpec().matrices(f"p{i}", (rows, columns))
        weight, gradient = torch.randn(rows * columns), torch.randn(rows * columns)
        state = {"momentum_buffer": torch.randn(rows * columns)}
        result.append(MatrixWork(matrix, weight, gradient, 0, state, rule))
    return result


def test_small_matrices_of_one_shape_are_updated_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """By shape and options, within the bound on memory, large ones alone; each as if alone."""
    monkeypatch.setattr(matrix_step, "BATCH_MATRIX_NUMEL", 200)
    monkeypatch.setattr(matrix_step, "BATCH_NUMEL", 3 * 6 * 9)
    rule, other = MuonRule(), MuonRule(momentum=0.5)
    shapes = [(6, 9), (4, 4), (6, 9), (9, 6), (6, 9), (6, 9), (20, 20), (20, 20)]
    todo = [*works(shapes, rule), *works([(6, 9)], other)]
    together = batches(todo)
    sizes = [len(together[work]) for work in todo]
    assert sizes == [3, 1, 3, 1, 3, 1, 1, 1, 1]
    alone = [*works(shapes, rule), *works([(6, 9)], other)]
    for work, single in zip(todo, alone, strict=True):
        if not work.done:
            update_matrices(together[work])
        update_matrices([single])
        assert work.done and bool(work.finite)
        torch.testing.assert_close(work.weight, single.weight, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(work.state, single.state)


def test_an_update_that_is_not_finite_is_left_out_and_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The weights stay, finite matrices go on, and the name is logged in the next step, once."""
    torch.manual_seed(0)
    model = Tiny()
    dedicate(model, None, algorithm=Probe)
    bad = [model.layers[1].plain]
    optimizer = dmuon.OwnerOptimizer(
        model, Probe, lr=0.1, weight_decay=0.0, param_groups=[{"params": bad, "spoil": True}]
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with caplog.at_level(logging.WARNING, "torchtitan_dmuon"):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            assert not optimizer.last_step.skipped
    lines = [r.getMessage() for r in caplog.records if "not finite" in r.getMessage()]
    assert len(lines) == 1 and "layers.1.plain" in lines[0], lines
    for name, p in model.named_parameters():
        assert torch.equal(before[name], p.detach()) == (name == "layers.1.plain"), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_momentum_is_named_and_changes_no_weight(
    bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    """As from a damaged state: Newton-Schulz of it is not finite, so its matrix is left alone."""
    torch.manual_seed(0)
    model = Tiny()
    optimizer = dmuon.Muon(model, lr=0.1, weight_decay=0.0)
    optimizer.state[model.layers[0].plain]["momentum_buffer"][2, 3] = bad
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with caplog.at_level(logging.WARNING, "torchtitan_dmuon"):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
    lines = [r.getMessage() for r in caplog.records if "not finite" in r.getMessage()]
    assert len(lines) == 1 and "layers.0.plain" in lines[0], lines
    for name, p in model.named_parameters():
        assert torch.equal(before[name], p.detach()) == (name == "layers.0.plain"), name


@dataclass(frozen=True, kw_only=True)
class Wrong(MatrixOptimizer):
    """Breaks the contract in a way of one's choice."""

    how: str = "shape"

    def state_shapes(self, rows: int, columns: int) -> Any:
        return {"x": (-1,)} if self.how == "sizes" else {}

    def update(self, gradient: torch.Tensor, state: State) -> torch.Tensor:
        if self.how == "raises":
            raise ZeroDivisionError
        if self.how == "writes":
            gradient.mul_(2)
        return {
            "shape": gradient.T.contiguous(),
            "flat": gradient.flatten(),
            "dtype": gradient.to(torch.complex64),
            "whole": gradient.int(),
        }.get(self.how, gradient)


@pytest.mark.parametrize("how", ["shape", "flat", "dtype", "whole", "writes"])
def test_a_rule_that_breaks_the_contract_is_stopped_by_name(how: str) -> None:
    """Not reshaped, not cast, and no gradient that others may read changed in silence."""
    torch.manual_seed(0)
    model = Tiny()
    dedicate(model, None, algorithm=Wrong, cost="model")
    optimizer = dmuon.OwnerOptimizer(model, Wrong, how=how)
    model(torch.randn(4, 6)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"matrix optimizer .*_wrong: .*layers.0") as caught:
        optimizer.step()
    assert ("changed the gradient" in str(caught.value)) == (how == "writes")


def test_a_rule_that_fails_is_named_with_the_matrix() -> None:
    torch.manual_seed(0)
    model = Tiny()
    dedicate(model, None, algorithm=Wrong, cost="model")
    optimizer = dmuon.OwnerOptimizer(model, Wrong, how="raises")
    model(torch.randn(4, 6)).square().mean().backward()
    with pytest.raises(ZeroDivisionError) as caught:
        optimizer.step()
    (note,) = caught.value.__notes__
    assert "layers.0" in note and "wrong" in note
    with pytest.raises(ValueError, match=r"wrong: state_shapes must give .*got \(-1,\) for x"):
        dmuon.OwnerOptimizer(Tiny(), Wrong, how="sizes")


def test_an_instance_brings_its_options() -> None:
    torch.manual_seed(0)
    model = Tiny()
    dedicate(model, None, algorithm=find("soap")(lr=0.5, precondition_frequency=3), cost="model")
    group = dmuon.OwnerOptimizer(model).param_groups[0]
    assert (group["lr"], group["precondition_frequency"]) == (0.5, 3)
    model = Tiny()
    optimizer = dmuon.OwnerOptimizer(model, MuonRule(momentum=0.5), lr=0.1)
    assert optimizer.param_groups[0]["momentum"] == 0.5 and optimizer.param_groups[0]["lr"] == 0.1


def test_names_of_state_are_those_of_one_class_alone() -> None:
    """A class of one's own is not taken for a registered one of the same name, nor a subclass."""

    @dataclass(frozen=True, kw_only=True)
    class Muon(MuonRule):
        pass

    labels = {cls.label() for cls in (Muon, MuonRule, find("soap"), Probe, Wrong)}
    assert len(labels) == 5 and {"muon", "soap"} < labels
    assert owned_state.name(MuonRule(), "momentum_buffer") == "momentum_buffer"
    assert owned_state.name(Muon(), "momentum_buffer") != "momentum_buffer"


def test_rare_work_is_timed_in_little_time_and_counts_by_its_share() -> None:
    """A refresh every 100,000 steps is not waited for."""
    rule = find("soap")(precondition_frequency=100_000)
    rules = [(r.period, weight) for r, weight in rule.timed_as()]
    assert [period for period, _ in rules] == [1, 2]
    # Refreshing takes 7, a plain step 3: the mean is 3 + 4 / f.
    seconds = {1: 7.0, 2: 5.0}
    mean = sum(seconds[period] * weight for period, weight in rules)
    assert mean == pytest.approx(3 + 4 / 100_000)
    assert rule.measure_seconds(8, 8, torch.device("cpu")) > 0


def test_autocast_of_the_caller_does_not_reach_the_update() -> None:
    torch.manual_seed(0)
    models = [Tiny(), Tiny()]
    models[1].load_state_dict(models[0].state_dict())
    for model, autocast in zip(models, (False, True), strict=True):
        optimizer = dmuon.OwnerOptimizer(model, "soap", lr=0.1)
        for step in range(2):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                optimizer.step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_algorithms_are_found_by_name_or_import_path() -> None:
    assert {"muon", "normuon", "shampoo", "soap"} <= set(registered())
    assert find("muon") is MuonRule
    assert find(f"{Probe.__module__}:Probe") is Probe
    with pytest.raises(ValueError, match=r"unknown matrix optimizer 'soup'; did you mean 'soap'\?"):
        find("soup")
    with pytest.raises(ValueError, match="cannot import 'no_such_module:X'"):
        find("no_such_module:X")
    with pytest.raises(ValueError, match="has no attribute 'Y'"):
        find(f"{Probe.__module__}:Y")
    with pytest.raises(ValueError, match="lacks state_shapes, update"):
        find("torchtitan_dmuon.optim.matrix_optimizer:MatrixOptimizer")
    with pytest.raises(ValueError, match=r"cannot import '\.\.x:Y': TypeError"):
        find("..x:Y")
    with pytest.raises(ValueError, match="is not a subclass of MatrixOptimizer"):
        find("torch:Tensor")
    with pytest.raises(ValueError, match="'muon' is registered already"):
        register("muon")(Probe)


def test_options_are_checked_by_the_algorithm() -> None:
    def build(**options: Any) -> Callable[[], object]:
        torch.manual_seed(0)
        return lambda: dmuon.OwnerOptimizer(Tiny(), **options)

    with pytest.raises(ValueError, match=r"unknown option 'momentun' of muon; did you mean 'mom"):
        build(algorithm="muon", momentun=0.9)()
    with pytest.raises(ValueError, match="unknown option 'momentum' of soap"):
        build(algorithm="soap", momentum=0.9)()
    with pytest.raises(ValueError, match="momentum: expected 0 <= momentum < 1"):
        build(algorithm="normuon", momentum=1.0)()
    with pytest.raises(ValueError, match="unknown matrix optimizer"):
        build(algorithm="adam")()


def test_another_algorithm_than_owners_are_balanced_for_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = Tiny()
    dedicate(model, None)
    with caplog.at_level(logging.WARNING, "torchtitan_dmuon"):
        dmuon.OwnerOptimizer(model, "soap")
    assert "owners are balanced for the cost of muon, not of soap" in caplog.text
    model = Tiny()
    dedicate(model, None, algorithm="soap")
    assert dmuon.OwnerOptimizer(model).algorithm is find("soap")


def test_gathered_matrices_know_muon_only() -> None:
    torch.manual_seed(0)
    model = Tiny()
    dedicate(model, None, mode="gather", algorithm="soap")
    with pytest.raises(ValueError, match="mode gather, the baseline, knows muon only, got 'soap'"):
        dmuon.OwnerOptimizer(model, "soap")
