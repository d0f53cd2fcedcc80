"""What a matrix optimizer is to the runtime, and the registry of those there are.

A matrix optimizer gets the whole gradient of a matrix and its own state, on the matrix's owner, and
returns the update. Who owns what, communication, publishing, clipping and checkpoints do not know
which one it is (paper section 6).
"""

from __future__ import annotations

import importlib
import re
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, ClassVar, Literal, TypeVar

import torch

from torchtitan_dmuon.arguments import as_tuples, expect, is_size

State = dict[str, torch.Tensor]
Shape = tuple[int, ...]
StateShapes = Mapping[str, Shape | Literal["elementwise"]]

_REGISTRY: dict[str, type[MatrixOptimizer]] = {}
C = TypeVar("C", bound="type[MatrixOptimizer]")


@dataclass(frozen=True, kw_only=True)
class MatrixOptimizer(ABC):
    """The update rule of a matrix. Subclasses are frozen dataclasses whose fields are its options.

    Options are numbers, strings, booleans, dtypes and tuples of such: they stand in the optimizer's
    parameter groups and may change from step to step. All else that a rule remembers is state.

    Attributes:
        lr: Learning rate; a scheduler changes it.
        weight_decay: Decoupled: weights shrink by lr * weight_decay in each step.
        name: By which `register` knows the class.
    """

    name: ClassVar[str] = ""
    lr: float = 1e-3
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        """Make tuples of lists, and check the options. Subclasses call this and check theirs.

        Raises:
            ValueError: a value out of range; it names option and range.
        """
        for f in fields(self):
            object.__setattr__(self, f.name, as_tuples(getattr(self, f.name)))
        for option in ("lr", "weight_decay"):
            expect(option, getattr(self, option), is_size, "a finite number >= 0")

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> MatrixOptimizer:
        """Return the rule with the options of a parameter group."""
        options = {f.name: group[f.name] for f in fields(cls)}
        lr = options["lr"]
        if isinstance(lr, float) and -1e-9 < lr < 0:
            options["lr"] = 0.0  # what rounding leaves at a schedule's end
        return cls(**options)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> MatrixOptimizer:
        """Return the rule with options by name; those left out have their defaults.

        Raises:
            ValueError: an unknown option, with the nearest that there is, or a value out of range.
        """
        known = [f.name for f in fields(cls)]
        check_known(options, known, cls.label())
        return cls(**options)

    @abstractmethod
    def state_shapes(self, rows: int, columns: int) -> StateShapes:
        """Return what the rule remembers of a (rows, columns) matrix: shapes by name.

        State begins as zeros, in the dtype of the masters (float32). "elementwise" is a number for
        each element, in the matrix's shape; a checkpoint keeps it as part of the parameter, however
        that is cut into matrices. All other state is kept per matrix.
        """

    @abstractmethod
    def update(self, gradient: torch.Tensor, state: State) -> torch.Tensor:
        """Return the update of one matrix, and advance its state in place.

        The new weight is weight * (1 - lr * weight_decay) - adjusted_lr(rows, columns) * update.

        Args:
            gradient: (rows, columns), reduced over all ranks, clipped; not to be changed.
            state: As `state_shapes` says. The tensors are to be written in place.

        Returns:
            (rows, columns), any floating dtype.
        """

    def updates(
        self, gradients: Sequence[torch.Tensor], states: Sequence[State]
    ) -> Sequence[torch.Tensor]:
        """Return the updates of several matrices of one shape, each by itself.

        A rule that gains by computing them together overrides it.
        """
        return [self.update(g, s) for g, s in zip(gradients, states, strict=True)]

    def adjusted_lr(self, rows: int, columns: int) -> float:
        """Return the learning rate of a matrix of this shape."""
        return float(self.lr)

    def flops(self, rows: int, columns: int) -> float:
        """Return the floating-point operations of an update, on average over steps.

        For planning without a device. The default stands for one pass of elementwise work.
        """
        return 10.0 * rows * columns

    @property
    def period(self) -> int:
        """Steps after which the work of an update repeats."""
        return 1

    def timed_as(self) -> Sequence[tuple[MatrixOptimizer, float]]:
        """Return rules and weights: the time of an update is the weighted sum of theirs.

        For rules whose expensive work comes rarely: the mean over a long period then follows from
        means over short ones.
        """
        return [(self, 1.0)]

    @classmethod
    def label(cls) -> str:
        """Return the name that state and cost tables are kept under: equal for no two classes."""
        own = cls.__dict__.get("name", "")  # a subclass is not its parent
        return own or re.sub(r"\W+", "_", f"{cls.__module__}_{cls.__qualname__}").lower()

    def measure_seconds(
        self, rows: int, columns: int, device: torch.device, *, repeats: int = 3
    ) -> float:
        """Return the time of an update of a shape on `device`, in seconds.

        Of each rule of `timed_as` the median over `repeats` of the mean over a period, after two
        updates that set up state, libraries and kernels.
        """
        generator = torch.Generator(device).manual_seed(0)
        gradient = torch.randn(rows, columns, device=device, generator=generator)
        parts = []
        for rule, weight in self.timed_as():
            state = new_state(rule, rows, columns, device=device)
            # On a GPU the second appearance of a shape records a graph (paper C.3).
            _seconds(rule, gradient, state, 2)
            times = [_seconds(rule, gradient, state, rule.period) for _ in range(repeats)]
            parts.append((statistics.median(times), weight))
        # Noise must not make a difference of times vanish.
        return max(sum(t * w for t, w in parts), 0.1 * min(t for t, _ in parts))


def checked_shapes(rule: MatrixOptimizer, rows: int, columns: int) -> StateShapes:
    """Return what `rule.state_shapes` does.

    Raises:
        ValueError: it is not what it is to be.
    """
    shapes = rule.state_shapes(rows, columns)
    for key, shape in shapes.items():
        sizes = isinstance(shape, tuple) and all(isinstance(n, int) and n >= 0 for n in shape)
        if shape != "elementwise" and not sizes:
            raise ValueError(
                f"matrix optimizer {rule.label()}: state_shapes must give 'elementwise' or a tuple "
                f"of sizes, got {shape!r} for {key}"
            )
    return shapes


def new_state(
    rule: MatrixOptimizer,
    rows: int,
    columns: int,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> State:
    """Return a matrix's state before the first step."""
    return {
        key: torch.zeros(
            (rows, columns) if shape == "elementwise" else shape, device=device, dtype=dtype
        )
        for key, shape in checked_shapes(rule, rows, columns).items()
    }


def check_known(options: Iterable[str], known: Sequence[str], owner: str, where: str = "") -> None:
    """Check names of options.

    Raises:
        ValueError: one is not known; it names the nearest that is.
    """
    for option in options:
        if option not in known:
            close = get_close_matches(option, known, 1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise ValueError(
                f"{where}unknown option '{option}' of {owner}{hint} (known: {', '.join(known)})"
            )


def register(name: str) -> Callable[[C], C]:
    """Class decorator: make a rule known by a name, for `algorithm = "name"`.

    Raises:
        ValueError: another class has the name.
    """

    def apply(cls: C) -> C:
        known = _REGISTRY.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (
            cls.__module__,
            cls.__qualname__,
        ):
            raise ValueError(
                f"matrix optimizer '{name}' is registered already: {known.__module__}."
                f"{known.__qualname__}"
            )
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return apply


def registered() -> tuple[str, ...]:
    """Return the names of all matrix optimizers, sorted."""
    importlib.import_module("torchtitan_dmuon.optim.algorithms")
    return tuple(sorted(_REGISTRY))


def find(name: str) -> type[MatrixOptimizer]:
    """Return a matrix optimizer's class.

    Args:
        name: Of a registered one, or "module:Class", which is imported.

    Raises:
        ValueError: there is none; it names those there are, and what went wrong with an import.
    """
    known = registered()
    if name in known:
        return _REGISTRY[name]
    module, colon, qualified = name.partition(":")
    if not colon:
        close = get_close_matches(name, known, 1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise ValueError(
            f"algorithm: unknown matrix optimizer '{name}'{hint} (known: {', '.join(known)}; or "
            "module:Class of your own)"
        )
    try:
        found = getattr(importlib.import_module(module), qualified)
    except Exception as error:  # whatever a module of somebody else's raises
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"algorithm: cannot import '{name}': {what}") from error
    if not (isinstance(found, type) and issubclass(found, MatrixOptimizer)):
        raise ValueError(f"algorithm: '{name}' is not a subclass of MatrixOptimizer")
    if missing := sorted(found.__abstractmethods__):
        raise ValueError(f"algorithm: '{name}' lacks {', '.join(missing)}")
    return found


def _seconds(rule: MatrixOptimizer, gradient: torch.Tensor, state: State, count: int) -> float:
    """Return the mean time of some updates."""
    _wait(gradient.device)
    start = time.perf_counter()
    for _ in range(count):
        rule.update(gradient, state)
    _wait(gradient.device)
    return (time.perf_counter() - start) / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
