"""`--section.key value` options: parsed to the same tables as TOML files, and checked alike."""

from __future__ import annotations

import dataclasses
import tomllib
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from torchtitan_dmuon.config.errors import ConfigError, nearest
from torchtitan_dmuon.config.toml_io import Source


@dataclasses.dataclass(frozen=True, slots=True)
class CommandLine(Source):
    """The command line as a source of values; `text` lists the keys that it sets."""

    def at(self, key: str) -> str:
        return f"--{key}"

    def line(self, key: str) -> int | None:
        return 1 if key in self.text.split() else None


def keys(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the type hint of every key that can be set on a command line, by dotted name."""
    found: dict[str, Any] = {}
    hints = get_type_hints(type(config), include_extras=True)
    for f in dataclasses.fields(config):
        value, name = getattr(config, f.name), f"{prefix}{f.name}"
        if dataclasses.is_dataclass(value):
            found |= keys(value, f"{name}.")
        elif get_origin(hints[f.name]) is not Annotated:
            found[name] = hints[f.name]
        elif tyro.conf.Suppress not in hints[f.name].__metadata__:
            found[name] = get_args(hints[f.name])[0]
    return found


def parse(arguments: list[str], config: Any) -> tuple[dict[str, Any], CommandLine]:
    """Turn options into a table for `toml_io.merge`; the last of equal options wins.

    Args:
        arguments: `--a.b value`, `--a.b=value`, `--a.flag` (true), `--a.list x y` or `x,y`.
        config: The dataclass instance that decides which keys there are.

    Raises:
        ConfigError: an unknown option, or not one value where one is expected.
    """
    known = keys(config)
    table: dict[str, Any] = {}
    given = []
    rest = list(arguments)
    while rest:
        option = rest.pop(0)
        if not _is_option(option):
            raise ConfigError(f'"{option}": expected an option, --section.key value (see --help)')
        key, has_value, value = option[2:].partition("=")
        key = key.replace("-", "_")
        if key not in known:
            raise ConfigError(f"--{key}: {_unknown(key, known)}")
        values = [value] if has_value else []
        while not has_value and rest and not _is_option(rest[0]):
            values.append(rest.pop(0))
        section = table
        *sections, name = key.split(".")
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = _value(known[key], values, key)
        given.append(key)
    return table, CommandLine("command line", " ".join(given))


def _is_option(argument: str) -> bool:
    # Unlike a negative number, and unlike the value "--".
    return argument.startswith("--") and argument[2:3].isalpha()


def _unknown(key: str, known: Mapping[str, Any]) -> str:
    inside = [k for k in known if k.startswith(f"{key}.")]
    if inside:
        return f"is a section; expected one of its keys, e.g. --{inside[0]} (see --help)"
    # A key without, or with another, section is more likely meant than a similar spelling.
    same_name = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
    close = nearest(key, [f"--{k}" for k in same_name] or [f"--{k}" for k in known])
    if same_name and not close:
        close = f"; did you mean '--{same_name[0]}'?"
    return f"unknown option{close or ' (see --help)'}"


def _value(hint: Any, values: list[str], key: str) -> Any:
    kinds = set(_flatten(hint))
    if get_origin(hint) is dict and len(values) == 1:
        return _scalar(values[0], keep_text=False)
    if kinds & {list, tuple}:
        if types.NoneType in kinds and values == ["none"]:
            return "none"
        union = get_origin(hint) in (Union, types.UnionType)
        words = union and any(get_origin(option) is Literal for option in get_args(hint))
        if words and len(values) == 1 and isinstance(_scalar(values[0], keep_text=False), str):
            return values[0]  # one of the words, or meant to be
        text = " ".join(values)
        if text.startswith("["):
            return _scalar(text, keep_text=False)
        items = [item for v in values for item in v.split(",")]
        return [_scalar(item, keep_text=str in kinds and not words) for item in items]
    if not values and bool in kinds:
        return True
    if len(values) != 1:
        got = f'got "{" ".join(values)}"' if values else "got none"
        raise ConfigError(f"--{key}: expected one value, {got}")
    return _scalar(values[0], keep_text=str in kinds)


def _flatten(hint: Any) -> Iterable[Any]:
    """Yield the plain types inside unions, lists and literals, and list and tuple themselves."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        yield from (type(a) for a in args)
    elif origin is None:
        yield hint
    else:
        yield origin
        for a in args:
            yield from _flatten(a)


def _scalar(text: str, *, keep_text: bool) -> Any:
    """Read a value as TOML would; what is not TOML stays text, for `merge` to refuse by type."""
    if keep_text:
        return text
    try:
        return tomllib.loads(f"x = {text.lower() if text in ('True', 'False') else text}")["x"]
    except tomllib.TOMLDecodeError:
        return text
