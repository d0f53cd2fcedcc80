"""TOML text to dataclasses and back, with errors that name file, line, key and remedy."""

from __future__ import annotations

import dataclasses
import re
import tomllib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tomli_w

from torchtitan_dmuon.config.errors import ConfigError, nearest

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where values come from: a file and its text, for messages."""

    path: str
    text: str

    def at(self, key: str) -> str:
        """Return `file:line: key` of a dotted key, or `file: key` where the line is not found."""
        line = self.line(key)
        return f"{self.path}:{line}: {key}" if line else f"{self.path}: {key}"

    def line(self, key: str) -> int | None:
        """Return the line that sets a dotted key, or that opens its section; None if neither.

        An entry of a list of tables and the keys inside, `a.b[1].c`, are at the entry's header.
        """
        if entry := re.match(r"([\w.]+)\[(\d+)\]", key):
            opening = re.compile(rf"\s*\[\[\s*{re.escape(entry.group(1))}\s*\]\]")
            lines = enumerate(self.text.splitlines(), start=1)
            headers = [number for number, line in lines if opening.match(line)]
            key = entry.group(1)
            if int(entry.group(2)) < len(headers):
                return headers[int(entry.group(2))]
        section = ""
        header_line = None
        for number, line in enumerate(self.text.splitlines(), start=1):
            if header := re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]", line):
                section = header.group(1).replace('"', "").replace(" ", "")
                if section == key and header_line is None:
                    header_line = number
            elif name := re.match(r"""\s*["']?([\w.\-"' ]+?)["']?\s*=""", line):
                full = ".".join(filter(None, [section, re.sub("[\"' ]", "", name.group(1))]))
                if full == key or (full.startswith(key + ".") and header_line is None):
                    return number
        return header_line


def read(path: Path, shown: str) -> tuple[dict[str, Any], Source]:
    """Parse a TOML file.

    Raises:
        ConfigError: unreadable file, text that is not UTF-8, or a TOML error with its line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as e:
        raise ConfigError(f"{shown}: cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{shown}: not a UTF-8 text file (byte {e.start})") from e
    try:
        return tomllib.loads(text), Source(shown, text)
    except tomllib.TOMLDecodeError as e:
        found = re.search(r"\(at line (\d+), column (\d+)\)", str(e))
        line = f":{found.group(1)}" if found else ""
        raise ConfigError(f"{shown}{line}: not valid TOML: {e}") from e


def merge(default: T, table: Mapping[str, Any], source: Source, prefix: str = "") -> T:
    """Return a copy of the dataclass instance `default` with the values of `table` in place.

    Raises:
        ConfigError: unknown key, wrong type, bad literal, or a value that the dataclass refuses.
    """
    assert dataclasses.is_dataclass(default) and not isinstance(default, type)
    hints = get_type_hints(type(default), include_extras=True)
    names = [f.name for f in dataclasses.fields(default) if f.init and f.name in hints]
    values = {}
    for name, value in table.items():
        key = f"{prefix}{name}"
        if name not in names:
            kind = "section" if isinstance(value, dict) else "key"
            inside = [n for n in names if name in _fields(getattr(default, n))]
            close = f"; it belongs in [{prefix}{inside[0]}]" if inside else nearest(name, names)
            raise ConfigError(
                f"{source.at(key)}: unknown {kind}{close} (known here: {', '.join(sorted(names))})"
            )
        current = getattr(default, name)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{source.at(key)}: expected a [{key}] section, got {_show(value)}"
                )
            values[name] = merge(current, value, source, f"{key}.")
        else:
            values[name] = _convert(hints[name], value, key, source)
    try:
        return dataclasses.replace(default, **values)  # type: ignore[type-var]
    except (ValueError, AssertionError) as e:
        where = source.at(prefix.rstrip(".")) if prefix else source.path
        raise ConfigError(f"{where}: {e}") from e


def _fields(value: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []


def _convert(hint: Any, value: Any, key: str, source: Source) -> Any:
    """Check `value` against a type hint; the result has exactly the hinted type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _convert(args[0], value, key, source)
    if origin in (Union, types.UnionType):
        return _convert_union(args, value, key, source)
    if origin is Literal:
        if value not in args or isinstance(value, bool) != isinstance(args[0], bool):
            close = nearest(value, map(str, args)) if isinstance(value, str) else ""
            choices = ", ".join(f'"{a}"' for a in args)
            raise ConfigError(f"{source.at(key)}: {_show(value)} is not one of {choices}{close}")
        return value
    if origin in (list, tuple) and isinstance(value, list):
        if origin is tuple and len(args) != len(value):
            raise ConfigError(f"{source.at(key)}: expected {len(args)} values, got {len(value)}")
        kinds = args if origin is tuple else args * len(value)
        return origin(
            _convert(kind, v, f"{key}[{i}]", source)
            for i, (kind, v) in enumerate(zip(kinds, value, strict=True))
        )
    if origin is dict and isinstance(value, dict):
        return dict(value)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _build(hint, value, key, source)
    if hint is Any or (isinstance(hint, type) and _is_a(value, hint)):
        return float(value) if hint is float else value
    raise ConfigError(f"{source.at(key)}: expected {describe(hint)}, got {_show(value)}")


def _convert_union(args: tuple[Any, ...], value: Any, key: str, source: Source) -> Any:
    # TOML has no null: the string "none" stands for it where a key may be unset.
    if types.NoneType in args and isinstance(value, str) and value.lower() == "none":
        return None
    for option in args:
        if option is not types.NoneType:
            try:
                return _convert(option, value, key, source)
            except ConfigError:
                continue
    expected = " or ".join(describe(a) for a in args)
    words = [str(w) for a in args if get_origin(a) is Literal for w in get_args(a)]
    close = nearest(value, words) if isinstance(value, str) else ""
    raise ConfigError(f"{source.at(key)}: expected {expected}, got {_show(value)}{close}")


def _build(cls: Any, table: Mapping[str, Any], key: str, source: Source) -> Any:
    """Build a dataclass that has no default instance (an entry of a list of tables)."""
    required = {
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    if missing := sorted(required - table.keys()):
        raise ConfigError(f"{source.at(key)}: missing {', '.join(missing)}")
    hints = get_type_hints(cls, include_extras=True)
    for name in table:
        if name not in hints:
            raise ConfigError(f"{source.at(key)}.{name}: unknown key{nearest(name, hints)}")
    return cls(**{n: _convert(hints[n], v, f"{key}.{n}", source) for n, v in table.items()})


def _is_a(value: Any, kind: type) -> bool:
    if kind is float:
        # A whole number of any length is TOML, but not all of them are floats.
        real = isinstance(value, int | float) and not isinstance(value, bool)
        return real and (isinstance(value, float) or abs(value) < 10**300)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def describe(hint: Any) -> str:
    """Name a type for people who write TOML."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(f'"{a}"' for a in args)
    if origin in (list, tuple):
        many = "a list" if origin is list else f"{len(args)} values"
        return f"{many} ({describe(args[0])} each)" if args else "a list"
    if origin is dict or dataclasses.is_dataclass(hint):
        return "a table"
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a string",
        types.NoneType: '"none"',
    }
    return names.get(hint, str(hint))


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return f"{str(value).lower()} (a boolean)"
    if isinstance(value, str):
        return f'"{value}" (a string)'
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return f"{value}"


def to_table(config: Any, default: Any) -> dict[str, Any]:
    """Return a dataclass as a TOML table, sections last. `default` decides what "none" means.

    A key that is unset and unset by default is left out; one that was unset on purpose is "none".
    """
    values: dict[str, Any] = {}
    sections: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        if not f.init or f.name.startswith("_"):
            continue
        value, initial = getattr(config, f.name), getattr(default, f.name)
        if dataclasses.is_dataclass(value):
            sections[f.name] = to_table(value, initial)
        elif value is None:
            if initial is not None:
                values[f.name] = "none"
        elif isinstance(value, list | tuple):
            items = [dataclasses.asdict(v) if dataclasses.is_dataclass(v) else v for v in value]  # type: ignore[arg-type]
            values[f.name] = items
        else:
            values[f.name] = value
    return values | sections


def dumps(table: Mapping[str, Any]) -> str:
    """Return a table as TOML text."""
    return tomli_w.dumps(table)
