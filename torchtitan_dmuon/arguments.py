"""One message for every wrong argument: its name, what was expected, what was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_LARGEST = 3.4e38
"""Of float32, which weights and state have."""


def expect(name: str, value: Any, valid: Callable[[Any], Any], wanted: str) -> None:
    """Check an argument.

    Args:
        name: Of the argument.
        value: What was given, of any type.
        valid: Whether the value will do; may fail on values of other types.
        wanted: Completes "expected ...".

    Raises:
        ValueError: it will not.
    """
    try:
        good = bool(valid(value))
    except (TypeError, AttributeError, RuntimeError, ValueError, LookupError, ArithmeticError):
        good = False
    if not good:
        raise ValueError(f"{name}: expected {wanted}, got {value!r}")


def as_tuples(value: Any) -> Any:
    """Return lists, which TOML has, as tuples, in depth: options are compared and hashed."""
    return tuple(map(as_tuples, value)) if isinstance(value, list | tuple) else value


def is_count(value: Any, least: int = 0) -> bool:
    """Whether it is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_size(value: Any) -> bool:
    """Whether it is a number >= 0 that float32 holds; a tensor with one element counts."""
    return not isinstance(value, str | bool) and 0 <= float(value) <= _LARGEST
