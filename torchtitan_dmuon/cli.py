"""The `dmuon` command: `dmuon COMMAND [options]`, also `python -m torchtitan_dmuon.cli`."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import tyro

from torchtitan_dmuon.bench import lines as bench
from torchtitan_dmuon.config import toml_io
from torchtitan_dmuon.config.command_line import keys, parse
from torchtitan_dmuon.config.errors import ConfigError, nearest
from torchtitan_dmuon.patching import PatchError

COMMANDS = {"bench": (bench.Options, bench.run)}
"""Of each command its options, and what runs it: (options, job options, all arguments)."""

_USAGE = """\
usage: dmuon COMMAND [options]

Tools around training with owned matrices. To train, use run_train.sh.

commands:
{commands}

dmuon COMMAND --help explains a command and lists its options."""


def usage() -> str:
    """Return the text of `dmuon --help`."""
    lines = []
    for name, (options, _) in COMMANDS.items():
        summary = " ".join(str(inspect.getdoc(options)).partition("\n\n")[0].split())
        lines.append(f"  {name:<10} {summary}")
    return _USAGE.format(commands="\n".join(lines))


def split(arguments: Sequence[str], own: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part a command's own options from those of the job, which have a section (or are --device).

    An option takes the values behind it along. What belongs to neither stays with the command,
    whose parser names it.
    """
    parts: tuple[list[str], list[str]] = ([], [])
    target = parts[0]
    for argument in arguments:
        if argument.startswith("--"):
            key = argument[2:].partition("=")[0].replace("-", "_")
            target = parts[1] if key not in own and ("." in key or key == "device") else parts[0]
        target.append(argument)
    return parts


def read(command: str, arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """Return a command's options, and those of the job.

    Raises:
        ConfigError: a mistake in the options, in one line.
        SystemExit: status 0 after `--help`.
    """
    options = COMMANDS[command][0]
    if "--help" in arguments or "-h" in arguments:
        tyro.cli(options, args=["--help"], prog=f"dmuon {command}", use_underscores=True)
    default = options()
    own, job = split(arguments, list(keys(default)))
    table, source = parse(own, default)
    return toml_io.merge(default, table, source), job


def _stop(text: str, status: int) -> NoReturn:
    print(text, file=sys.stderr if status else sys.stdout)
    raise SystemExit(status)


def main() -> int:
    """Entry point. Exit status: 0, 1 failed, 2 bad arguments or config."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("--help", "-h"):
        _stop(usage(), 0 if arguments else 2)
    command = arguments.pop(0)
    if command not in COMMANDS:
        known = f" (commands: {', '.join(COMMANDS)}; see --help)"
        _stop(f"error: {command}: no such command{nearest(command, COMMANDS)}{known}", 2)
    try:
        options, job = read(command, arguments)
        COMMANDS[command][1](options, job, arguments)
    except (ConfigError, PatchError) as e:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
