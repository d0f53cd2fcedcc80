"""`dmuon timeline`: draws a training step, and says where its time went."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from torchtitan_dmuon.config.errors import ConfigError

if TYPE_CHECKING:
    from torchtitan_dmuon.timeline.breakdown import Breakdown
    from torchtitan_dmuon.timeline.trace import Trace

VERSION = 1

_MOST_RANKS = 16
"""Of a report as text."""

_COLUMNS = ("step", "forward", "backward", "optimizer", "exposed", "publish_wait", "idle")


@dataclass(kw_only=True, slots=True)
class Options:
    """Draw a training step from its traces, and say where the time went: forward, backward,
    optimizer, exposed communication, publish wait, idle.

    A job records one trace per rank every 10 steps, and a training loop of your own with
    dmuon.profile:

    ./run_train.sh --config debug_owner_hsdp_z3.toml --profiler.enable_profiling

    dmuon timeline outputs/debug_owner_hsdp_z3/profiling/traces

    dmuon timeline outputs/debug_owner_hsdp_z3/profiling/traces/iteration_20 --out step.html

    dmuon timeline rank0_trace.json.gz --step 20 --json

    docs/timeline.md has the names of the ranges, and what each figure means on CPUs and on GPUs.
    """

    trace: Annotated[str, tyro.conf.Positional] = ""
    """A trace (.json or .json.gz), or a folder with one per rank. Of folders iteration_N the newest
    is taken."""

    step: int = -1
    """Which step of the trace. -1: its last."""

    rank: int = -1
    """Whose timeline the picture shows; its bars are of all ranks. -1: the lowest."""

    out: str = ""
    """Write the picture to this file: .svg, .html (with the figures) or .png (needs matplotlib)."""

    json: bool = False
    """Print JSON; docs/timeline.md explains the keys."""


def find_files(given: str) -> list[Path]:
    """Return the traces that a path means.

    Raises:
        ConfigError: there are none.
    """
    if not given:
        raise ConfigError("dmuon timeline: expected a trace, or a folder of traces (see --help)")
    path = Path(given)
    if path.is_file():
        return [path]
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder")
    if not path.is_dir():
        raise ConfigError(f"{path}: expected a trace file or a folder of them")
    found = _traces_in(path)
    if not found:
        numbered = [
            (int(p.name.removeprefix("iteration_")), p)
            for p in path.glob("iteration_*")
            if p.name.removeprefix("iteration_").isdecimal()
        ]
        for _, folder in sorted(numbered, reverse=True):
            if found := _traces_in(folder):
                break
    if not found:
        raise ConfigError(f"{path}: no trace in it (*.json, *.json.gz)")
    return found


def _traces_in(folder: Path) -> list[Path]:
    # A name with a dot before it is a file that is being written.
    return sorted(
        p
        for p in folder.iterdir()
        if p.name.endswith((".json", ".json.gz")) and not p.name.startswith(".") and p.is_file()
    )


def analyse(files: Sequence[Path], step: int, rank: int) -> tuple[Breakdown, list[dict[str, Any]]]:
    """Break one step down for every file; one trace at a time is in memory.

    Args:
        files: A trace per rank.
        step: Number; -1: the last of the first file.
        rank: Whose breakdown is returned whole; -1: the lowest.

    Returns:
        That breakdown, and the figures of all ranks, by rank.

    Raises:
        ConfigError: a file is no trace, or has no such step or rank.
    """
    from torchtitan_dmuon.timeline.breakdown import break_down
    from torchtitan_dmuon.timeline.trace import TraceError, read_trace

    found: dict[int, tuple[Path, dict[str, Any]]] = {}
    shown: Breakdown | None = None
    for index, path in enumerate(files):
        try:
            trace = read_trace(path)
        except TraceError as e:
            raise ConfigError(str(e)) from e
        trace.rank = index if trace.rank < 0 else trace.rank
        step = _choose(trace, step)
        result = break_down(trace, step)
        if result.rank in found:
            other = found[result.rank][0].name
            raise ConfigError(f"{path}: rank {result.rank} is in {other} too; expected one a rank")
        found[result.rank] = path, result.as_dict()
        if result.rank == rank or (rank < 0 and result.rank == min(found)):
            shown = result
    if shown is None:
        known = ", ".join(map(str, sorted(found)[:16]))
        raise ConfigError(f"--rank {rank}: no such rank in the traces; there are {known}")
    return shown, [figures for _, (_, figures) in sorted(found.items())]


def _choose(trace: Trace, step: int) -> int:
    if step == -1:
        return max(trace.steps)
    if step not in trace.steps:
        nearest = min(trace.steps, key=lambda n: (abs(n - step), n))
        raise ConfigError(
            f"--step {step}: not in {trace.path}; nearest is {nearest} (it has "
            f"{_ranges(sorted(trace.steps))})"
        )
    return step


def _ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers briefly: `3 to 5, 9`."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    shown = [str(a) if a == b else f"{a} to {b}" for a, b in parts[:8]]
    return ", ".join(shown) + (", ..." if len(parts) > 8 else "")


def report(figures: Sequence[dict[str, Any]]) -> str:
    """Return the figures of a step as text; of many ranks, those of the first."""
    shown = figures[:_MOST_RANKS]
    rows = [("rank", *(name.replace("_", " ") for name in _COLUMNS))]
    rows += [(str(r["rank"]), *(f"{r[f'{name}_ms']:.2f}" for name in _COLUMNS)) for r in shown]
    kinds = [("rank", "communication", "under way", "hidden", "exposed")]
    for r in shown:
        for kind, under_way in r["communication"].items():
            figure = (under_way, r["hidden"][kind], r["exposed"][kind])
            if any(figure):
                total, hidden, exposed = (f"{ms:.2f}" for ms in figure)
                kinds.append((str(r["rank"]), kind, total, hidden, exposed))
    first = figures[0]
    lines = [f"step {first['step']} ({first['device']}), milliseconds", *_aligned(rows)]
    if len(kinds) > 1:
        lines += ["", *_aligned(kinds)]
        if any(r["exposed"][k] > r["communication"][k] for r in shown for k in r["communication"]):
            lines.append(
                "exposed beyond under way: FSDP2 waits there for collectives under `other`"
            )
    if len(figures) > len(shown):
        lines.append(f"and {len(figures) - len(shown)} more ranks (--json has all)")
    return "\n".join(lines)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def check_picture(out: str) -> None:
    """Raise ConfigError for a picture that cannot be written, before traces are read."""
    from torchtitan_dmuon.timeline.picture import FORMATS

    if not out:
        return
    path = Path(out)
    if path.suffix not in FORMATS:
        raise ConfigError(f"--out {out}: expected a name that ends in {', '.join(FORMATS)}")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"--out: no such folder: {path.resolve().parent}")
    if path.exists() and not path.is_file():
        raise ConfigError(f"--out {out}: it is not a file; expected a name, e.g. step.html")


def run(options: Options, job_options: Sequence[str], arguments: Sequence[str]) -> None:
    """Read, print and draw.

    Raises:
        ConfigError: what is wrong, in one line.
    """
    if job_options:
        raise ConfigError(f"{job_options[0]}: dmuon timeline takes no job (see --help)")
    if options.step < -1 or options.rank < -1:
        raise ConfigError(
            f"--step {options.step} --rank {options.rank}: expected at least 0, or -1"
        )
    check_picture(options.out)
    files = find_files(options.trace)
    shown, figures = analyse(files, options.step, options.rank)
    if options.out:
        _draw(options.out, shown, figures)
    if options.json:
        result = {"version": VERSION, "trace": str(files[0].parent), "ranks": figures}
        print(json.dumps(result, indent=2))
    else:
        print(report(figures))


def _draw(out: str, shown: Breakdown, figures: Sequence[dict[str, Any]]) -> None:
    from torchtitan_dmuon.timeline.picture import draw, write

    try:
        write(draw(shown, figures), Path(out), report(figures))
    except OSError as e:
        raise ConfigError(f"--out {out}: {e.strerror or e}") from e
    except ImportError as e:
        raise ConfigError(
            f"--out {out}: PNG needs matplotlib (pip install matplotlib); .svg and .html do not"
        ) from e
