"""Sites: the modules whose calls bring groups in, and the class that makes a module one.

A module becomes a site by getting a class of its own in front of the one it had, as `fully_shard`
does it. The work is done in `__call__`, around everything that a call does: hooks, a compiled
forward, a checkpoint wrapper. So compiled graphs contain none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
import torch.nn as nn
from torch.utils._pytree import tree_map

from torchtitan_dmuon.runtime.group import Group


class Hooks(Protocol):
    """What happens around the calls of a site: the runtime."""

    def enter(self, site: Site, args: Any, kwargs: Any) -> tuple[Any, Any]: ...

    def leave(self, site: Site, outputs: Any) -> Any: ...

    def fail(self) -> None: ...

    def owned_parameters(self) -> set[nn.Parameter]: ...

    def move(self, group: Group, convert: Callable[[torch.Tensor], torch.Tensor]) -> None: ...

    def zero_grad(self) -> None: ...


class Site:
    """A module with owned parameters, or the model itself.

    Attributes:
        name: Canonical name of the module; empty for the model.
        module: The module.
        runtime: Set once the groups are built.
        group: The group of the module's own owned parameters, if it has any.
        groups: That group, and those whose parameters the module shares with another site.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.runtime: Hooks = cast("Hooks", None)
        self.group: Group | None = None
        self.groups: tuple[Group, ...] = ()

    def __repr__(self) -> str:
        return f"Site({self.name or 'model'})"

    def cast_inputs(self, dtype: torch.dtype | None, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return a call's inputs in the dtype that its layer computes with; None: as they are."""
        if dtype is None or not self.groups:
            return args, kwargs

        def to(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                return value.to(dtype)
            return value

        return tree_map(to, args), tree_map(to, kwargs)

    def guard_state_dict(self) -> None:
        """Refuse `state_dict` and `load_state_dict` while owned parameters are placeholders."""
        if self.group is None:
            return

        def check(*_: object) -> None:
            group = self.group
            if group is not None and not (group.exposed or (group.resident and group.exact)):
                raise RuntimeError(
                    f"{self.name or 'the model'}: its owned parameters are not gathered; read or "
                    "write a state_dict inside `with full_params(model):` (writeback=True to load)"
                )

        self.module.register_state_dict_pre_hook(check)
        self.module.register_load_state_dict_pre_hook(check)

    # A compiled model breaks its graph here and goes on inside the module.
    @torch.compiler.disable
    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.runtime.enter(self, args, kwargs)

    @torch.compiler.disable
    def leave(self, outputs: Any) -> Any:
        return self.runtime.leave(self, outputs)

    @torch.compiler.disable
    def fail(self) -> None:
        self.runtime.fail()


class DedicatedModule:
    """Comes before the class of a module that is a site."""

    _dmuon_site: Site

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        site = self._dmuon_site
        args, kwargs = site.enter(args, kwargs)
        try:
            outputs = super().__call__(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            site.fail()
            raise
        return site.leave(outputs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """`to`, `to_empty`, `cuda`, ...: owned parameters follow by their masters alone."""
        site = self._dmuon_site
        # Before anything is converted: a refusal must leave the model as it was.
        for inner in sites_of(cast(nn.Module, self)):
            if inner.group is not None:
                inner.group.check_move(fn)
        with _hidden(cast(nn.Module, self), site.runtime.owned_parameters()):
            result = super()._apply(fn, recurse)  # type: ignore[misc]
        if site.group is not None:
            site.runtime.move(site.group, fn)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients of the module, also those that owners hold."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        self._dmuon_site.runtime.zero_grad()

    def __deepcopy__(self, memo: object) -> Any:
        raise NotImplementedError(
            "a model with owned parameters cannot be deep-copied; copy it before dedicate_params"
        )


@contextmanager
def _hidden(module: nn.Module, parameters: set[nn.Parameter]) -> Iterator[None]:
    """Take `parameters` out of a module and its children for a while, places kept."""
    hidden: list[tuple[nn.Module, str]] = []
    before: list[nn.Parameter] = []
    for child in module.modules():
        for attribute, parameter in child._parameters.items():
            if parameter is not None and parameter in parameters:
                hidden.append((child, attribute))
                before.append(parameter)
    for child, attribute in hidden:
        child._parameters[attribute] = None
    try:
        yield
    finally:
        for (child, attribute), parameter in zip(hidden, before, strict=True):
            # Nested sites have restored theirs already, possibly as new objects.
            if child._parameters[attribute] is None:
                child._parameters[attribute] = parameter


def make_site(module: nn.Module, site: Site) -> None:
    """Put `DedicatedModule` in front of the module's class."""
    old = type(module)
    module.__class__ = type(f"Dedicated{old.__name__}", (DedicatedModule, old), {})
    module._dmuon_site = site  # type: ignore[assignment]


def sites_of(module: nn.Module) -> list[Site]:
    """Return the sites in a module and its children, in module order; raises as `each_site`."""
    return list(each_site(module))


def each_site(module: nn.Module) -> Iterator[Site]:
    """Yield the sites in a module and its children, in module order.

    Raises:
        TypeError: it is not a module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected the model, an nn.Module, got {type(module).__name__}")
    for child in module.modules():
        if isinstance(child, DedicatedModule):
            yield child._dmuon_site


def canonical_name(name: str) -> str:
    """Return a parameter's or module's name without the parts that wrappers add."""
    for part in ("_checkpoint_wrapped_module", "_orig_mod"):
        name = name.replace(f"{part}.", "").removesuffix(f".{part}").removesuffix(part)
    return name
