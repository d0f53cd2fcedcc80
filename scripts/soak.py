#!/usr/bin/env python3
"""Train long on line D while every rank naps at random moments, and see that nothing changes.

    python scripts/soak.py --mesh 2x4 --zero 3 --steps 2000 --json record.json

A small decoder trains on 8 ranks of this machine with `communication="operators"`, in an ordinary
PyTorch loop (dedicate_params, fully_shard, Muon). Ranks nap before layers, in backward, before
tasks of the publish are released or waited for, and in the threads that communicate; in some steps
for long. Some steps accumulate micro-batches, reduced each or all at once, evaluate, have batches
of other shapes, show the full parameters, or get new weights from outside. What must hold:

- losses of every rank and all weights are, bit for bit, those of the same job without naps, which
  runs before for fewer steps (--reference);
- all copies of weights have the same bits, compared every 50 steps;
- from the tenth part of the steps to the end nothing grows: resident memory (by 1 percent + 8 MiB
  at most), mapped shared memory, threads, descriptors, tensors;
- in that time 99.9 percent of the gradients whose allocation was known were born in their places;
- in the end no name is left in /dev/shm.

Ranks that nap leave the cores to others, so the machine may be busy with other work.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.operators.soaking import (  # noqa: E402
    Record,
    Soak,
    apart,
    different,
    grown,
    hit_rate,
    run,
)
from tests.worlds import RankFailed, run_world  # noqa: E402

MIB = 2**20
STARTING_SECONDS = 300


@dataclass(kw_only=True, slots=True)
class Options:
    """Train long on line D while every rank naps at random moments; nothing may change."""

    mesh: str = "2x4"
    """Rows x columns: replicate x shard, at least two rows or columns."""

    zero: Literal[2, 3] = 3
    """2: parameters stay gathered from forward to backward; 3: they are freed between."""

    steps: int = 2000
    """Steps with naps."""

    reference: int | None = None
    """Steps without naps, before, to compare the first ones with; None: 300, or all if fewer."""

    seed: int = 0
    """Of data, kinds of steps and naps."""

    nap_share: float = 0.05
    """Share of the places passed at which a rank naps, for 0.2 to 4 ms."""

    long_share: float = 0.03
    """Share of the steps in which some ranks nap once for 30 to 200 ms."""

    limit_minutes: float = 120
    """Limit of each of the two runs."""

    json: Path | None = None
    """File to write the figures to."""


def shape_of(text: str) -> tuple[int, int] | None:
    """Return (rows, columns); None if the text is not two whole numbers with an x between."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    return (int(found[1]), int(found[2])) if found else None


def names_in_shared_memory() -> set[str]:
    """Return the names of windows that this user has in /dev/shm."""
    return {path.name for path in Path("/dev/shm").glob(f"dmuon-{os.getuid()}-*")}


def left_behind(before: set[str]) -> list[str]:
    """Say which names are new and stay; another job's have one only while it opens its window."""
    deadline = time.monotonic() + 20
    while (names := names_in_shared_memory() - before) and time.monotonic() < deadline:
        time.sleep(0.5)
    return [f"/dev/shm/{name}: left behind" for name in sorted(names)]


def table(records: list[Record]) -> str:
    """Return what was counted, for people: of all ranks the largest."""
    rows = [
        "| step | ms a step | resident MiB | shared MiB | threads | descriptors | tensors | "
        "gradients born in place | elsewhere |",
        "|---" * 9 + "|",
    ]
    for marks in zip(*(record.marks for record in records), strict=True):

        def largest(name: str, marks: Any = marks) -> Any:
            return max(getattr(mark, name) for mark in marks)

        hits = sum(mark.gradients[0] for mark in marks)
        others = sum(sum(mark.gradients) - mark.gradients[0] for mark in marks)
        rows.append(
            f"| {marks[0].step:,} | {largest('milliseconds'):.0f} | "
            f"{largest('resident') / MIB:.1f} | {largest('shared') / MIB:.1f} | "
            f"{largest('threads')} | {largest('descriptors')} | {largest('tensors')} | "
            f"{hits:,} | {others:,} |"
        )
    return "\n".join(rows)


def summary(records: list[Record]) -> list[str]:
    """Return what else there is to tell."""
    growth = [r.marks[-1].resident - r.marks[0].resident for r in records]
    rates = [hit_rate(r.marks[0], r.marks[-1]) for r in records]
    naps = sum((r.naps for r in records[1:]), records[0].naps.copy())
    seconds = sum(r.napped_seconds for r in records)
    kinds, operated = records[0].kinds.most_common(), records[0].operated.items()
    return [
        f"memory grew by {min(growth) / MIB:.2f} to {max(growth) / MIB:.2f} MiB from step "
        f"{records[0].marks[0].step:,} on; hit rate at least {min(rates):.4%}",
        f"copies of weights compared {records[0].comparisons} times",
        "steps: " + ", ".join(f"{count:,} {kind}" for kind, count in kinds),
        "operators, calls of a rank: " + ", ".join(f"{n:,} {name}" for name, n in operated),
        f"naps of all ranks: {sum(naps.values()):,}, {seconds:.0f} s ("
        + ", ".join(f"{count:,} {place}" for place, count in naps.most_common())
        + ")",
        f"last losses: {', '.join(f'{r.losses[-1]:.4f}' for r in records)}",
    ]


def soak(options: Options, mesh: tuple[int, int]) -> tuple[list[str], dict[str, Any]]:
    """Run the job twice. Returns what did not hold, and the record."""
    before = names_in_shared_memory()
    job = Soak(
        mesh,
        zero=options.zero,
        steps=options.steps,
        digest_at=options.reference,
        seed=options.seed,
        nap_share=options.nap_share,
        long_share=options.long_share,
        told=True,
    )
    calm = dataclasses.replace(job, steps=options.reference, nap_share=0.0, long_share=0.0)
    limit = STARTING_SECONDS + 60 * options.limit_minutes
    size = mesh[0] * mesh[1]
    print(f"without naps, {options.reference} steps:", file=sys.stderr, flush=True)
    quiet = run_world(size, run, calm, timeout_seconds=limit)
    print(f"with naps, {options.steps} steps:", file=sys.stderr, flush=True)
    start = time.monotonic()
    records = run_world(size, run, job, timeout_seconds=limit)
    minutes = (time.monotonic() - start) / 60
    failures = different(quiet, records) + apart(records) + grown(records) + left_behind(before)
    print(table(records))
    print()
    print("\n".join([*summary(records), f"{minutes:.1f} minutes"]))
    return failures, {
        "options": {**dataclasses.asdict(options), "json": None},
        "minutes": round(minutes, 1),
        "failures": failures,
        "ranks": [_with_text_keys(dataclasses.asdict(record)) for record in records],
    }


def _with_text_keys(value: Any) -> Any:
    """JSON knows no tuples as keys."""
    if isinstance(value, dict):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_text_keys(item) for item in value]
    return value


def main() -> int:
    """Entry point. Exit status: 0, 1 something did not hold or a rank failed, 2 bad arguments."""
    options = tyro.cli(Options, use_underscores=True)
    mesh = shape_of(options.mesh)
    if options.reference is None:
        options.reference = min(300, options.steps)
    problem = None
    if mesh is None or mesh == (1, 1):
        problem = f"--mesh {options.mesh}: expected rows x columns of two ranks or more, as 2x4"
    elif options.steps < 10:
        problem = f"--steps {options.steps}: expected 10 or more"
    elif not 10 <= options.reference <= options.steps:
        problem = f"--reference {options.reference}: expected 10 to {options.steps} (--steps)"
    elif not (0 <= options.nap_share <= 1 and 0 <= options.long_share <= 1):
        problem = "--nap_share and --long_share: expected shares from 0 to 1"
    elif options.limit_minutes <= 0:
        problem = f"--limit_minutes {options.limit_minutes}: expected more than 0"
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    assert mesh is not None
    try:
        failures, record = soak(options, mesh)
    except RankFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    print(f"{options.steps} steps: " + ("FAILED" if failures else "everything held"))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
