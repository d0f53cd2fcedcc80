"""Look up a model by name and flavor."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from torchtitan.models import qwen3
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_dmuon.config.errors import ConfigError, nearest

from . import llama, qwen2_5, qwen_moe
from .llama import LLAMA_FLAVORS, llama_flavors, llama_model_spec

__all__ = ["ATTENTION_BACKENDS", "get_model_spec", "model_flavors", "model_names", "toy_flavor"]

ATTENTION_BACKENDS = ("flex", "flex_flash", "varlen", "sdpa")


@dataclass(frozen=True, slots=True)
class _Family:
    flavors: Callable[[], Iterable[str]]
    spec: Callable[[str, str], ModelSpec]
    """Takes the flavor and the attention backend."""
    toy: Callable[[str], str]
    """Takes a flavor; a small one for smoke tests with the same structure, or that one itself."""


def _llama_toy(flavor: str) -> str:
    return f"{flavor}{llama.TOY}" if flavor in LLAMA_FLAVORS else "debugmodel"


def _qwen2_5_toy(flavor: str) -> str:
    return flavor if flavor in ("debug", "bench") else f"{flavor}{qwen2_5.TOY}"


def _qwen3_toy(flavor: str) -> str:
    if flavor.startswith("debugmodel"):
        return flavor
    # Named after all and the active parameters: those are the flavors with experts.
    return "debugmodel_moe" if "-A" in flavor else "debugmodel"


def _qwen_moe_toy(flavor: str) -> str:
    return "debug"


_FAMILIES: dict[str, _Family] = {
    "llama3": _Family(llama_flavors, llama_model_spec, _llama_toy),
    "qwen2_5": _Family(partial(list, qwen2_5.QWEN2_5_SIZES), qwen2_5.model_registry, _qwen2_5_toy),
    "qwen3": _Family(partial(list, qwen3.qwen3_configs), qwen3.model_registry, _qwen3_toy),
    "qwen_moe": _Family(
        partial(list, qwen_moe.QWEN_MOE_SIZES), qwen_moe.model_registry, _qwen_moe_toy
    ),
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


def toy_flavor(name: str, flavor: str) -> str:
    """Return the flavor of a few hundred thousand parameters that stands in for one in a smoke run.

    It has what decides the code path: tied or not, query heads per KV head, biases, experts, fused
    or separate Q, K and V. The toy of a toy is that toy. For flavors of torchtitan itself it is the
    debug model of their family.

    Raises:
        ValueError: unknown name or flavor.
    """
    _check("model name", name, model_names())
    toys = {_FAMILIES[name].toy(known) for known in model_flavors(name)}
    if flavor in toys:
        return flavor
    _check(f"flavor of {name}", flavor, model_flavors(name))
    return _FAMILIES[name].toy(flavor)


def get_model_spec(name: str, flavor: str, *, attn_backend: str) -> ModelSpec:
    """Build the ``ModelSpec`` of a model; its config is fresh and may be changed freely.

    Args:
        name: one of ``model_names()``.
        flavor: one of ``model_flavors(name)``, or the ``toy_flavor`` of one.
        attn_backend: one of ``ATTENTION_BACKENDS``.

    Raises:
        ValueError: unknown name, flavor or backend (the message has the nearest valid choice and
            the list), or a backend that torchtitan cannot run here.
    """
    _check("model name", name, model_names())
    if flavor not in map(_FAMILIES[name].toy, model_flavors(name)):
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
