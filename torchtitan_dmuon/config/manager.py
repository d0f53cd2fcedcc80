"""Reads a job: command line over config file over defaults."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import tyro
from torchtitan.config.manager import ConfigManager, custom_registry

from torchtitan_dmuon.config import toml_io
from torchtitan_dmuon.config.command_line import parse
from torchtitan_dmuon.config.errors import ConfigError, nearest
from torchtitan_dmuon.config.lines import resolve
from torchtitan_dmuon.config.schema import JobConfig
from torchtitan_dmuon.config.smoke import describe, smoke_table

CONFIG_FOLDER = Path(__file__).resolve().parent.parent.parent / "train_configs"
DEFAULT_CONFIG = "debug_hsdp_z2.toml"

_DESCRIPTION = """\
Train from a TOML job config. --config takes a path or the name of a file in train_configs/
(default: debug_hsdp_z2.toml); every key below can be set in the file, in its [section], or
here as --section.key value, which wins. A file may start from another one with a first line
base = "other.toml". line = "A", "B", "C", "D" or "torch" switches mode and optimizer at once.
--print-config shows the result as TOML and stops. --smoke runs five steps of the job on four CPU
ranks with a toy of its model, and with random tokens for data that is not here. --plan says what
the job would cost on this machine and stops; dmuon plan does so for a cluster."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A resolved job and where its values come from."""

    config: JobConfig
    sources: tuple[toml_io.Source, ...]
    """
    The command line, `--smoke` where it is asked for, the config file, then the chain of files that
    it builds on (`base`).
    """
    print_config: bool
    smoke: tuple[str, ...] | None = None
    """What `--smoke` changed, in lines for people; None without it."""
    plan: bool = False
    """Whether `--plan` asks only for what the job would cost here."""

    def at(self, key: str) -> str:
        """Say where a key was set, for messages."""
        for source in self.sources:
            if source.line(key) is not None:
                return source.at(key)
        return f"{self.path}: {key} (default)"

    @property
    def path(self) -> str:
        """The config file, as messages show it."""
        return next(s.path for s in self.sources if type(s) is toml_io.Source)


def find_config(name: str) -> Path:
    """Resolve `--config`: an existing path, or a file of train_configs/ with or without suffix.

    Raises:
        ConfigError: naming the nearest file that exists.
    """
    folder_names = [name] if name.endswith(".toml") else [name, f"{name}.toml"]
    candidates = [Path(n) for n in folder_names]
    if os.sep not in name:
        candidates += [CONFIG_FOLDER / n for n in folder_names]
    for path in candidates:
        if path.is_file():
            return path
    if Path(name).is_dir():
        raise ConfigError(f"--config {name}: is a folder; expected a TOML file")
    known = sorted(p.name for p in CONFIG_FOLDER.glob("*.toml"))
    close = nearest(Path(name).name, known)
    raise ConfigError(
        f"--config {name}: no such file{close} (in train_configs/: {', '.join(known)})"
    )


def _read_chain(path: Path) -> list[tuple[dict[str, Any], toml_io.Source]]:
    """Read a config file and those it builds on.

    `base = "other.toml"` names a file beside it, or one of train_configs/.

    Raises:
        ConfigError: a file that cannot be read, or a file that builds on itself.
    """
    files: list[tuple[dict[str, Any], toml_io.Source]] = []
    seen: list[Path] = []
    while True:
        shown = os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
        table, source = toml_io.read(path, shown)
        files.append((table, source))
        seen.append(path.resolve())
        base = table.pop("base", None)
        if base is None:
            return files
        if not isinstance(base, str):
            raise ConfigError(f'{source.at("base")}: expected the name of a file, e.g. "x.toml"')
        beside = path.parent / base
        path = beside if beside.is_file() else CONFIG_FOLDER / base
        if not path.is_file():
            folders = (beside.parent, CONFIG_FOLDER)
            known = [p.name for folder in folders for p in folder.glob("*.toml")]
            raise ConfigError(f"{source.at('base')}: no such file: {beside}{nearest(base, known)}")
        if path.resolve() in seen:
            raise ConfigError(f"{source.at('base')}: {path} builds on itself")


def _take(arguments: list[str], option: str) -> tuple[str | None, list[str]]:
    """Take `--option value` or `--option=value` out of the arguments; the last one wins."""
    value, rest = None, []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == option:
            value = next(remaining, None)
        elif argument.startswith(option + "="):
            value = argument.partition("=")[2]
        else:
            rest.append(argument)
            continue
        if not value or value.startswith("--"):
            raise ConfigError(f"{option}: expected a value")
    return value, rest


def load_job(arguments: list[str], *, quiet: bool = False) -> Job:
    """Resolve a job from command-line arguments, without the program's name.

    Args:
        arguments: `[--config FILE] [--smoke] [--plan] [--print-config] [--help]
            [--section.key value ...]`.
        quiet: Print no help (ranks other than 0).

    Raises:
        ConfigError: a mistake in a file or on the command line.
        SystemExit: status 0 for `--help`.
    """
    name, rest = _take(arguments, "--config")
    print_config, smoke, plan = (f in rest for f in ("--print-config", "--smoke", "--plan"))
    rest = [a for a in rest if a not in ("--print-config", "--smoke", "--plan")]
    path = find_config(DEFAULT_CONFIG if name is None else name)
    with _without_warnings():
        files = _read_chain(path)
        config = JobConfig()
        for table, source in reversed(files):
            config = toml_io.merge(config, table, source)
        if "--help" in rest or "-h" in rest:
            _print_help(config, quiet)
        sources = tuple(source for _, source in files)
        as_in_files = config
        if smoke:
            table, smoke_source = smoke_table(config, path.stem)
            config = toml_io.merge(config, table, smoke_source)
            sources = (smoke_source, *sources)
        table, command_line = parse(rest, config)
        config = toml_io.merge(config, table, command_line)
        sources = (command_line, *sources)
        config = resolve(config, sources)
    changes = tuple(describe(as_in_files, config, smoke_source, command_line)) if smoke else None
    return Job(config, sources, print_config, changes, plan)


def _print_help(config: JobConfig, quiet: bool) -> NoReturn:
    """Print every key with its meaning and the value it would have, and exit."""
    ConfigManager()  # registers torchtitan's rules for the types of its keys
    tyro.cli(
        JobConfig,
        args=["--help"],
        default=config,
        registry=custom_registry,
        description=_DESCRIPTION,
        prog="run_train.sh",
        use_underscores=True,
        config=(tyro.conf.FlagConversionOff,),
        console_outputs=not quiet,
    )
    raise SystemExit(0)


def print_config(config: JobConfig) -> None:
    """Print a resolved config as TOML that loads back to the same config."""
    with _without_warnings():
        default = JobConfig()
    sys.stdout.write(toml_io.dumps(toml_io.to_table(config, default)))


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Hold back what torchtitan's dataclasses log about their own defaults while being built.

    They log again when the trainer builds them, once, with the final values.
    """
    root = logging.getLogger()
    disabled, root.disabled = root.disabled, True
    try:
        yield
    finally:
        root.disabled = disabled
