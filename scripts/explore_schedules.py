#!/usr/bin/env python3
"""Run every small case of the operators' protocol under thousands of random schedules each.

    python scripts/explore_schedules.py --schedules 2016

A case is an operation, 1 to 4 nodes of 1 or 2 ranks, and 0 to 3 chunks per owner node: 1,360 in
all. Each runs in the simulator with every number of slots (1 to 3), thread groups (1 to 4) and
lanes of a queue (0 to 2; 0: the core's choice), with random delays of every operation and writes in
any order that weak memory allows. What must hold: no deadlock, no lost or doubled chunk, no slot
overwritten before it was read, no write before all ranks have entered, and the right bytes. The
first violation ends the run and is printed with its case and seed.
tests/operators/test_sim_protocol.py shows that broken protocols are noticed.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.operators.sim_cases import cases, check  # noqa: E402
from torchtitan_dmuon.simulator.binding import Violation  # noqa: E402

SETTINGS = tuple(itertools.product((1, 2, 3), (1, 2, 3, 4), (0, 1, 2)))
"""Slots, thread groups, lanes."""

Case = tuple[str, int, tuple[int, ...]]


@dataclass(kw_only=True, slots=True)
class Options:
    """Run every small case of the operators' protocol under thousands of random schedules each."""

    schedules: int = 2016
    """Of each case, in equal parts for each of the 36 settings."""

    seed: int = 0
    """Of the delays."""

    processes: int = os.cpu_count() or 1
    """That share the cases."""

    json: Path | None = None
    """File to write the figures to."""


def explore(work: tuple[int, Case, int, int]) -> tuple[int, str]:
    """Run one case; return the steps of its thread groups, and what was found wrong."""
    number, case, each, seed = work
    steps = 0
    for i, (slots, groups, lanes) in enumerate(SETTINGS):
        start = (seed * 1_000_003 + number) * len(SETTINGS) * each + i * each
        try:
            steps += check(
                case, slots=slots, groups=groups, lanes=lanes, seed=start, schedules=each
            )
        except Violation as error:
            where = f"{case}, {slots} slots, {groups} groups, {lanes} lanes, seed {start}"
            return steps, f"{where}: {error}"
    return steps, ""


def main() -> int:
    options = tyro.cli(Options, description=__doc__)
    each = options.schedules // len(SETTINGS)
    if each < 1 or options.processes < 1 or options.seed < 0:
        print(
            f"error: expected --schedules of {len(SETTINGS)} or more, --processes of 1 or more and "
            "--seed of 0 or more",
            file=sys.stderr,
        )
        return 2
    work = [(n, case, each, options.seed) for n, case in enumerate(cases())]
    begin, told, steps = time.monotonic(), 0.0, 0
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for done, (more, wrong) in enumerate(pool.imap(explore, work), 1):
            steps += more
            if wrong:
                print(f"violation: {wrong}", file=sys.stderr)
                return 1
            seconds = time.monotonic() - begin
            if seconds - told > 30 or done == len(work):
                told, left = seconds, seconds / done * (len(work) - done)
                print(
                    f"{done:,} of {len(work):,} cases, {steps:,} steps, {left / 60:.1f} min left",
                    file=sys.stderr,
                    flush=True,
                )
    found = {
        "cases": len(work),
        "settings": len(SETTINGS),
        "schedules_per_case": each * len(SETTINGS),
        "steps": steps,
        "minutes": (time.monotonic() - begin) / 60,
    }
    print(
        f"{found['cases']:,} cases, {found['schedules_per_case']:,} schedules each, "
        f"{steps:,} steps of thread groups, {found['minutes']:.1f} minutes: everything held"
    )
    if options.json is not None:
        shown = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(options).items()}
        options.json.write_text(json.dumps({"options": shown, **found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
