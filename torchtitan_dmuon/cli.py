"""The `dmuon` command: `dmuon COMMAND [options]`, also `python -m torchtitan_dmuon.cli`."""

from __future__ import annotations

import inspect
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn, get_args, get_origin, get_type_hints

import tyro

from torchtitan_dmuon import costs, doctor
from torchtitan_dmuon.bench import lines as bench
from torchtitan_dmuon.checkpoint import export
from torchtitan_dmuon.config import toml_io
from torchtitan_dmuon.config.command_line import keys, parse
from torchtitan_dmuon.config.errors import ConfigError, nearest
from torchtitan_dmuon.log import end_of_pipe
from torchtitan_dmuon.patching import PatchError
from torchtitan_dmuon.planner import command as planner
from torchtitan_dmuon.simulator import command as simulator
from torchtitan_dmuon.timeline import command as timeline

COMMANDS: dict[str, tuple[Callable[[], Any], Callable[[Any, list[str], list[str]], None]]] = {
    "bench": (bench.Options, bench.run),
    "costs": (costs.Options, costs.run),
    "doctor": (doctor.Options, doctor.run),
    "export": (export.ExportOptions, export.run_export),
    "import": (export.ImportOptions, export.run_import),
    "plan": (planner.Options, planner.run),
    "simulate": (simulator.Options, simulator.run),
    "timeline": (timeline.Options, timeline.run),
}
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


def place(arguments: Sequence[str], default: Any) -> list[str]:
    """Give positional arguments the names of their options, so that all are read alike.

    Where a command has positionals, every option takes one value, and a flag none.

    Args:
        arguments: Of the command.
        default: Its options; positional are those whose type is `tyro.conf.Positional`.

    Raises:
        ConfigError: more positional arguments than the command has.
    """
    hints = get_type_hints(type(default), include_extras=True)
    names = [
        name
        for name, hint in hints.items()
        if get_origin(hint) is Annotated and tyro.conf.Positional in get_args(hint)
    ]
    if not names:
        return list(arguments)
    options: list[str] = []
    values: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            values.append(argument)
            continue
        options.append(argument)
        flag = hints.get(argument[2:]) is bool
        if "=" not in argument and not flag and rest and not rest[0].startswith("--"):
            options.append(rest.pop(0))
    if len(values) > len(names):
        raise ConfigError(f'"{values[len(names)]}": one argument too many (see --help)')
    for name, value in zip(names, values, strict=False):
        if any(x.split("=")[0] == f"--{name}" for x in options):
            raise ConfigError(f"--{name}: it is {value} already; give one")
    named = [x for name, v in zip(names, values, strict=False) for x in (f"--{name}", v)]
    return named + options


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
    own, job = split(place(arguments, default), list(keys(default)))
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
        try:
            COMMANDS[command][1](options, job, arguments)
        finally:
            sys.stdout.flush()
    except (ConfigError, PatchError) as e:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        return end_of_pipe()
    return 0


if __name__ == "__main__":
    sys.exit(main())
