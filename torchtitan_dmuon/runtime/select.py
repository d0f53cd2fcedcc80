"""Which modules are layers, and which of their parameters get owners."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn.modules.conv import _ConvNd as _Convolution

from torchtitan_dmuon.arguments import expect
from torchtitan_dmuon.ownership import Layer, LayerParameter, MatrixSpec
from torchtitan_dmuon.runtime.group import OwnedParameter
from torchtitan_dmuon.runtime.site import canonical_name

ParameterPredicate = Callable[[str, nn.Parameter], bool]
ModulePredicate = Callable[[str, nn.Module], bool]

# Modules without a forward of their own.
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_HEADS = ("lm_head", "output", "head", "embed_out", "classifier", "score")


@dataclass(slots=True)
class SelectedLayer:
    """A layer, its owned parameters, and the layers whose parameters it shares.

    Attributes:
        name: Canonical name of the module.
        module: The module.
        parameters: Parameters that are owned here, in the module's order.
        borrowed: Indices of other layers that own a parameter registered in this module too.
    """

    name: str
    module: nn.Module
    parameters: list[OwnedParameter]
    borrowed: set[int]

    def as_layer(self) -> Layer:
        return Layer(
            self.name,
            tuple(LayerParameter(p.name, tuple(p.shape), p.matrices) for p in self.parameters),
        )


def find_layers(model: nn.Module, predicate: ModulePredicate | None) -> list[tuple[str, nn.Module]]:
    """Return the modules that are gathered and reduced as one, with canonical names.

    Without a predicate these are the items of the outermost containers (ModuleList, ModuleDict,
    Sequential) whose items are all of one class, e.g. transformer blocks, or of the outermost
    ModuleLists of blocks of several classes; in a model without such containers its direct children
    that hold parameters; failing that, the model. Embeddings and what is named like an output head
    are never layers.

    Raises:
        ValueError: the predicate selects no module, or one inside another.
    """
    if predicate is not None:
        chosen = [
            (canonical_name(name), module)
            for name, module in model.named_modules()
            if predicate(canonical_name(name), module)
        ]
        if not chosen:
            raise ValueError(f"hook_boundary_predicate {_name(predicate)} selects no module")
        _check_callable(chosen)
        _check_apart(chosen)
        return chosen
    found: list[tuple[str, nn.Module]] = []
    _search(model, "", found)
    if not found:
        found = _children(model, "")
    if not found:
        found = [("", model)]
    return [(canonical_name(name), module) for name, module in found]


def _check_apart(layers: list[tuple[str, nn.Module]]) -> None:
    names = {module: name for name, module in layers}
    for name, module in layers:
        for inner in module.modules():
            if inner is not module and inner in names:
                raise ValueError(
                    f"hook_boundary_predicate selects {names[inner]} inside {name or 'the model'}; "
                    "a layer is gathered as a whole and cannot hold another"
                )


def _check_callable(layers: list[tuple[str, nn.Module]]) -> None:
    for name, module in layers:
        if isinstance(module, _LISTS):
            raise ValueError(
                f"hook_boundary_predicate selects {name}, a {type(module).__name__}: it is never "
                "called itself; select its items"
            )


def _search(module: nn.Module, prefix: str, found: list[tuple[str, nn.Module]]) -> None:
    for name, child in module.named_children():
        full = f"{prefix}{name}"
        items = list(child.named_children())
        if isinstance(child, _CONTAINERS) and _holds_layers(child, [item for _, item in items]):
            found += [(f"{full}.{key}", i) for key, i in items if _may_be_layer(name, i)]
        else:
            _search(child, f"{full}.", found)


def _holds_layers(container: nn.Module, items: list[nn.Module]) -> bool:
    if not items or any(isinstance(item, _LISTS) for item in items):
        return False
    if len({type(item) for item in items}) == 1:
        return True
    # Blocks of several kinds, but not a layer's own parts: those are often single operations.
    blocks = all(any(True for _ in item.children()) for item in items)
    return isinstance(container, nn.ModuleList) and blocks


def _children(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """Return the children that may be layers; of lists, which are never called, their items."""
    found = []
    for name, child in module.named_children():
        if isinstance(child, _LISTS):
            found += _children(child, f"{prefix}{name}.")
        elif _may_be_layer(name, child):
            found.append((f"{prefix}{name}", child))
    return found


def _may_be_layer(name: str, module: nn.Module) -> bool:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) or name in _HEADS:
        return False
    return any(True for _ in module.parameters())


def select(
    model: nn.Module,
    layers: list[tuple[str, nn.Module]],
    predicate: ParameterPredicate | None,
    specs: Mapping[str, MatrixSpec] | None,
) -> list[SelectedLayer]:
    """Choose the owned parameters of each layer: its matrices, and its small tensors.

    Raises:
        ValueError: nothing is chosen as a matrix, a spec matches nothing, a chosen parameter cannot
            be read as matrices, or it is registered outside the layers too.
        NotImplementedError: a chosen parameter is sharded already (DTensor).
    """
    homes, places = _registrations(model, layers)
    default = _Default(model)
    names = {p: canonical_name(n) for n, p in model.named_parameters()}
    reader = _Specs(specs or {})
    result = [SelectedLayer(name, module, [], set()) for name, module in layers]
    chosen = 0
    for parameter, name in names.items():
        home = homes[parameter]
        is_matrix = bool(predicate(name, parameter) if predicate else default(name, parameter))
        if home == {None} or (None in home and not (is_matrix and predicate)):
            continue
        if None in home:
            raise ValueError(
                f"{name}: chosen by predicate, but also used outside the layers (tied weight?); "
                "leave it to fully_shard"
            )
        if parameter.numel() == 0:
            # No matrix, and FSDP2 cannot reduce a group of nothing: it rides along.
            is_matrix = False
        elif not is_matrix and parameter.ndim > 1:
            continue
        if not parameter.is_floating_point():
            continue
        _check_plain(name, parameter)
        matrices = reader.read(name, parameter) if is_matrix else ()
        chosen += len(matrices)
        first, *others = sorted(i for i in home if i is not None)
        result[first].parameters.append(
            OwnedParameter(name, parameter.shape, matrices, parameter, places[parameter])
        )
        for other in others:
            result[other].borrowed.add(first)
    reader.check_used()
    if not chosen:
        what = f"predicate {_name(predicate)}" if predicate else "no predicate was given, and it"
        raise ValueError(
            f"{what} selects no matrix inside the layers {_brief([name for name, _ in layers])}; "
            "owned matrices are 2-D or 3-D weights inside the modules that hook_boundary_predicate "
            "selects"
        )
    return result


def _registrations(
    model: nn.Module, layers: list[tuple[str, nn.Module]]
) -> tuple[dict[nn.Parameter, set[int | None]], dict[nn.Parameter, list[tuple[nn.Module, str]]]]:
    """Return for each parameter the innermost layers it is in (None: outside), and its places."""
    index = {module: i for i, (_, module) in reversed(list(enumerate(layers)))}
    homes: dict[nn.Parameter, set[int | None]] = {}
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}

    def visit(module: nn.Module, home: int | None) -> None:
        home = index.get(module, home)
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                homes.setdefault(parameter, set()).add(home)
                if (module, attribute) not in places.setdefault(parameter, []):
                    places[parameter].append((module, attribute))
        for child in module.children():
            visit(child, home)

    visit(model, None)
    return homes, places


class _Default:
    """What holds matrices unless the user says: 2-D weights, and 3-D stacks of them.

    Not embeddings (by type, by name or by the shape of one, which untied heads have), output heads
    (by name), convolutions, or 3-D tensors of vectors.
    """

    def __init__(self, model: nn.Module) -> None:
        self._others: set[nn.Parameter] = set()
        self._embeddings: set[torch.Size] = set()
        for module in model.modules():
            own = [p for p in module._parameters.values() if p is not None]
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                self._embeddings.update(p.shape for p in own)
                self._others.update(own)
            elif isinstance(module, _Convolution):
                self._others.update(own)

    def __call__(self, name: str, parameter: nn.Parameter) -> bool:
        if not parameter.is_floating_point() or parameter.ndim not in (2, 3):
            return False
        if parameter in self._others or parameter.shape in self._embeddings:
            return False
        if parameter.ndim == 3 and min(parameter.shape[1:]) == 1:
            return False
        parts = name.split(".")
        return not any(part in _HEADS or "embed" in part for part in parts[:-1])


def _check_plain(name: str, parameter: nn.Parameter) -> None:
    if type(parameter.data).__name__ == "DTensor" or hasattr(parameter, "placements"):
        raise NotImplementedError(
            f"{name}: is a DTensor already; call dedicate_params before fully_shard, and without "
            "tensor parallelism"
        )


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


class _Specs:
    """The user's patterns with the specs they give to names."""

    def __init__(self, specs: Mapping[str, MatrixSpec]) -> None:
        expect("matrix_specs", specs, lambda v: isinstance(v, Mapping), "patterns with MatrixSpecs")
        for pattern, spec in specs.items():
            what = f"matrix_specs[{pattern!r}]"
            expect(what, spec, lambda v: isinstance(v, MatrixSpec), "a MatrixSpec")
            expect("matrix_specs", pattern, _compiles, "a regular expression")
        self._specs = [(pattern, re.compile(pattern), spec) for pattern, spec in specs.items()]
        self._used: set[str] = set()

    def read(self, name: str, parameter: nn.Parameter) -> tuple:  # type: ignore[type-arg]
        shape = tuple(parameter.shape)
        for text, pattern, spec in self._specs:
            if pattern.search(name):
                self._used.add(text)
                return spec.matrices(name, shape)
        if len(shape) not in (2, 3):
            raise ValueError(
                f"{name} {shape}: chosen by predicate, but only 2-D weights and 3-D stacks are "
                "read without a MatrixSpec; give matrix_specs={pattern: MatrixSpec(flatten=True)} "
                "for a convolution"
            )
        return MatrixSpec().matrices(name, shape)

    def check_used(self) -> None:
        unused = [text for text, _, _ in self._specs if text not in self._used]
        if unused:
            raise ValueError(f"matrix_specs: {unused} match no matrix parameter of the layers")


def _name(predicate: Callable[..., bool]) -> str:
    return str(getattr(predicate, "__qualname__", repr(predicate)))


def _brief(names: list[str]) -> str:
    shown = ", ".join(name or "(the model)" for name in names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
