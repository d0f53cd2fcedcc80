"""A wrong argument is one clear message with its name, what was expected and what was given."""

from __future__ import annotations

import logging
import re
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn as nn

import torchtitan_dmuon as dmuon
from tests.runtime.plain import WIDTH, Decoder, Stack
from torchtitan_dmuon.runtime.select import find_layers


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"mesh": 4}, "mesh: expected a DeviceMesh or None, got 4"),
        ({"predicate": "weight"}, "predicate: expected a function"),
        ({"hook_boundary_predicate": [nn.Linear]}, "hook_boundary_predicate: expected a function"),
        (
            {"hook_boundary_predicate": lambda n, m: n == "layers"},
            "layers, a ModuleList: it is nev",
        ),
        ({"hook_boundary_predicate": lambda n, m: False}, "selects no module"),
        ({"predicate": lambda n, p: False}, "lambda> selects no matrix"),
        ({"param_dtype": "bfloat16"}, "param_dtype: expected a floating torch.dtype"),
        ({"param_dtype": torch.int32}, "param_dtype: expected a floating torch.dtype"),
        ({"reduce_dtype": torch.float16}, "reduce_dtype: expected torch.float32"),
        ({"param_dtype": torch.float16}, "sums of float16 overflow; give reduce_dtype"),
        ({"reshard_after_forward": 3}, "reshard_after_forward: expected True or False, got 3"),
        ({"prefetch_depth": 1.5}, "prefetch_depth: expected a whole number >= 0, got 1.5"),
        ({"prefetch_depth": -1}, "prefetch_depth: expected a whole number >= 0, got -1"),
        ({"gradient_divide_factor": float("inf")}, "gradient_divide_factor: expected a positive"),
        ({"gradient_divide_factor": "2"}, "gradient_divide_factor: expected a positive number"),
        ({"byte_cap": "x"}, "byte_cap: expected a number >= 0 or None, got 'x'"),
        ({"small_matrix_numel": -1}, "small_matrix_numel: expected a whole number >= 0, got -1"),
        ({"timeout": 5}, "timeout: expected a positive timedelta or None, got 5"),
        ({"timeout": timedelta(seconds=-1)}, "timeout: expected a positive timedelta"),
        ({"cost": "fast"}, "no cost table 'fast'; expected measured, model, "),
        ({"mode": "fsdp"}, "mode: expected owner or gather, got 'fsdp'"),
        ({"assignment": "lpt"}, "assignment: expected one of balanced, round_robin, elements"),
        (
            {"communication": "nccl"},
            "communication: expected c10d, operators, auto, or a function that opens a "
            "communicator, got 'nccl'",
        ),
        ({"matrix_specs": [1]}, "matrix_specs: expected patterns with MatrixSpecs"),
        ({"matrix_specs": {"up": (1, 2)}}, "matrix_specs['up']: expected a MatrixSpec"),
        (
            {"matrix_specs": {"(": dmuon.MatrixSpec()}},
            "matrix_specs: expected a regular expression",
        ),
        ({"matrix_specs": {"nothing": dmuon.MatrixSpec()}}, "['nothing'] match no matrix"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_dedicate_params_says_what_is_wrong(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        dmuon.dedicate_params(Stack(), **{"cost": "model", **arguments})


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"lr": "a"}, "lr: expected a finite number >= 0, got 'a'"),
        ({"lr": float("nan")}, "lr: expected a finite number >= 0, got nan"),
        ({"momentum": 1.0}, "momentum: expected 0 <= momentum < 1, got 1.0"),
        ({"nesterov": "no"}, "nesterov: expected True or False, got 'no'"),
        ({"ns_steps": 2.5}, "ns_steps: expected a whole number from 1 to 99, got 2.5"),
        ({"ns_coefficients": 3}, "ns_coefficients: expected polar_express, quintic, three"),
        ({"ns_coefficients": "abc"}, "or three for each step, got 'abc'"),
        ({"adjust_lr_fn": "rms"}, "adjust_lr_fn: expected None, original or match_rms_adamw"),
        ({"ns_dtype": torch.int8}, "ns_dtype: expected None or one of float16"),
        ({"adamw_betas": 3}, "adamw_betas: expected two numbers with 0 <= beta < 1, got 3"),
        ({"adamw_lr": "x"}, "adamw_lr: expected a finite number >= 0, got 'x'"),
        ({"publish": "later"}, "publish: expected async or sync, got 'later'"),
        ({"nonfinite": "warn"}, "nonfinite: expected skip or error, got 'warn'"),
        ({"param_groups": [{}]}, "param_groups: expected dicts with the key params, got {}"),
        ({"param_groups": [{"params": [nn.Parameter(torch.ones(2))]}]}, "is not in the model"),
        (
            {"param_groups": [{"params": [], "lr_": 1}]},
            "unknown option 'lr_' of muon; did you mean 'lr'?",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_muon_says_what_is_wrong(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        dmuon.Muon(Stack(), **arguments)


@pytest.mark.parametrize("rows", [3, ("a",), (8, 8.0), (), (0, 8), torch.ones(2)], ids=repr)
def test_matrix_spec_refuses_what_is_not_sizes(rows: Any) -> None:
    with pytest.raises(ValueError, match="rows: expected one or more whole numbers"):
        dmuon.MatrixSpec(rows=rows)


def test_parameters_in_place_of_the_model_are_told_apart() -> None:
    """The habit from torch.optim and torch.nn.utils."""
    model = Stack()
    with pytest.raises(TypeError, match=r"expected the model, an nn\.Module, got generator"):
        dmuon.Muon(model.parameters())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected the model, an nn\.Module, got generator"):
        dmuon.clip_grad_norm_(model.parameters(), 1.0)  # type: ignore[arg-type]


def test_named_and_single_parameters_make_groups_as_in_torch() -> None:
    model = Stack()
    norm, up = model.layers[0].norm.weight, model.layers[0].up.weight
    groups = [{"params": norm, "adamw_lr": 0.5}, {"params": [("any name", up)], "lr": 0.25}]
    optimizer = dmuon.Muon(model, param_groups=groups)
    rates = {name: g["lr"] for g in optimizer.param_groups for name in g["param_names"]}
    assert rates["layers.0.norm.weight"] == 0.5 and rates["layers.0.up.weight"] == 0.25


def test_what_cannot_be_trained_is_named() -> None:
    model = Decoder()
    model.twist = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"twist: torch\.complex64 parameters are not"):
        dmuon.Muon(model)


def test_empty_parameters_are_left_alone() -> None:
    model = Stack()
    model.layers[0].nothing = nn.Parameter(torch.empty(0, 8))
    optimizer = dmuon.Muon(model)
    model(torch.randn(4, WIDTH)).sum().backward()
    optimizer.step()
    assert optimizer.last_step.orthogonalized == 6


class Listed(nn.Module):
    """Layers in lists of plain containers, the last one not called."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        parts = [self._part() for _ in range(3)]
        if kind == "lists in a list":
            self.layers: Any = nn.ModuleList(nn.ModuleList(part) for part in parts)
        elif kind == "mixed list":
            self.layers = nn.ModuleList([*parts[0], *parts[1]])
        else:
            self.layers = nn.ModuleList(parts)

    @staticmethod
    def _part() -> nn.Sequential:
        return nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("sequentials", ["layers.0", "layers.1", "layers.2"]),
        ("mixed list", ["layers.0", "layers.2", "layers.3", "layers.5"]),
        ("lists in a list", [f"layers.{i}.{j}" for i in range(3) for j in (0, 2)]),
    ],
)
def test_layers_are_modules_that_are_called(kind: str, expected: list[str]) -> None:
    """A list has no forward of its own, so its weights would never be gathered."""
    assert [name for name, _ in find_layers(Listed(kind), None)] == expected


def test_a_layer_that_is_never_called_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = Stack()
    dmuon.dedicate_params(model)
    model.forward = lambda x: model.layers[0](x + 0)  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, "torchtitan_dmuon"):
        model(torch.randn(2, WIDTH))
    assert "did not call: layers.1, layers.2" in caplog.text


def test_a_grad_scaler_is_refused() -> None:
    """It would unscale the gradients of fully_shard alone."""
    model = Stack()
    optimizer = dmuon.Muon(model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.randn(4, WIDTH)).sum()).backward()
    with pytest.raises(NotImplementedError, match="compute in bfloat16"):
        scaler.step(optimizer)


def test_a_parametrization_after_dedicate_is_named() -> None:
    model = Stack()
    dmuon.dedicate_params(model)
    nn.utils.parametrizations.weight_norm(model.layers[1].up)
    with pytest.raises(ValueError, match=r"layers\.1\.up\.weight: owned, but replaced"):
        dmuon.Muon(model)
