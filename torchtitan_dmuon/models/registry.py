"""Look up a model by name and flavor."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from torchtitan.models import qwen3
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_dmuon.config.errors import ConfigError, nearest

from . import qwen2_5
from .llama import llama_flavors, llama_model_spec

__all__ = ["ATTENTION_BACKENDS", "get_model_spec", "model_flavors", "model_names"]

ATTENTION_BACKENDS = ("flex", "flex_flash", "varlen", "sdpa")


@dataclass(frozen=True, slots=True)
class _Family:
    flavors: Callable[[], Iterable[str]]
    spec: Callable[[str, str], ModelSpec]
    """Takes the flavor and the attention backend."""


_FAMILIES: dict[str, _Family] = {
    "llama3": _Family(llama_flavors, llama_model_spec),
    "qwen2_5": _Family(partial(list, qwen2_5.QWEN2_5_SIZES), qwen2_5.model_registry),
    "qwen3": _Family(partial(list, qwen3.qwen3_configs), qwen3.model_registry),
}


def model_names() -> list[str]:
    """Return the model names, sorted."""
    return sorted(_FAMILIES)


def model_flavors(name: str) -> list[str]:
    """Return the flavors of a model, in the order of its family; ours come last.

    Raises:
        ValueError: unknown name; the message has the nearest name and the list.
    """
    _check("model name", name, model_names())
    return list(_FAMILIES[name].flavors())


def get_model_spec(name: str, flavor: str, *, attn_backend: str) -> ModelSpec:
    """Build the ``ModelSpec`` of a model; its config is fresh and may be changed freely.

    Args:
        name: one of ``model_names()``.
        flavor: one of ``model_flavors(name)``.
        attn_backend: one of ``ATTENTION_BACKENDS``.

    Raises:
        ValueError: unknown name, flavor or backend (the message has the nearest valid choice and
            the list), or a backend that torchtitan cannot run here.
    """
    _check(f"flavor of {name}", flavor, model_flavors(name))
    _check("attention backend", attn_backend, ATTENTION_BACKENDS)
    return _FAMILIES[name].spec(flavor, attn_backend)


def _check(what: str, value: str, valid: Iterable[str]) -> None:
    choices = list(valid)
    if value in choices:
        return
    raise ConfigError(
        f"unknown {what} {value!r}{nearest(value, choices) or '.'} Valid: {', '.join(choices)}"
    )
