#!/usr/bin/env python3
"""Train one job on several lines and compare the losses step by step.

    python scripts/compare_lines.py --lines B,C,D --steps 200 --folder outputs/compare_lines \\
        --picture docs/images/line_losses.png

All lines start from the same weights and read the same samples in the same order, so without
rounding their losses would be equal. They differ in how a gradient's sum over ranks is rounded, and
training magnifies that with time. What stays small is what rounding does; a lost gradient, a weight
one step old or a wrong owner does not stay small.

Each line runs through the launcher, one after the other. Losses are those of TensorBoard, float32,
mean over all ranks. The picture needs matplotlib (extra `docs`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
LOSS = "loss_metrics/global_avg_loss"
PATIENCE_SECONDS = 7200
"""Limit of one line's job."""

COLOURS = {"A": "#8c8c8c", "B": "#f2b134", "C": "#4c78a8", "D": "#e4572e", "torch": "#59a14f"}


@dataclass(kw_only=True, slots=True)
class Options:
    """Train one job on several lines and compare the losses step by step."""

    config: str = "debug_owner_hsdp_z3.toml"
    """Job config: a path, or a file of train_configs/."""

    lines: str = "B,C,D"
    """The lines, with commas; differences are relative to the earlier of two."""

    ranks: int = 4
    """Ranks to start here."""

    steps: int = 200
    """Steps of each line; the learning rate's schedule is as long."""

    bound: float = 0.01
    """Largest relative difference of two lines' losses at any step."""

    folder: Path
    """For the jobs' outputs; must be new."""

    picture: Path | None = None
    """Picture to draw (.png or .svg)."""

    json: Path | None = None
    """File to write losses and differences to."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Of two lines' losses, relative to the first one's.

    Attributes:
        first, second: Names of the lines.
        largest: Largest of all steps.
        at: The step (from 1) of the largest.
        mean: Mean of all steps.
        begin: Step of the first difference; 0: there is none.
        last: Of the last step.
    """

    first: str
    second: str
    largest: float
    at: int
    mean: float
    begin: int
    last: float


def relative(first: dict[int, float], second: dict[int, float]) -> dict[int, float]:
    """Return |second - first| / |first| by step.

    Raises:
        ValueError: they have not the same steps.
    """
    if first.keys() != second.keys() or not first:
        raise ValueError(f"losses of {len(first)} and of {len(second)} steps; expected the same")
    return {step: abs(second[step] - value) / abs(value) for step, value in sorted(first.items())}


def compare(losses: dict[str, dict[int, float]]) -> list[Difference]:
    """Compare every two lines. A loss that is not finite makes a difference that is not finite."""
    found = []
    for first, second in combinations(losses, 2):
        values = relative(losses[first], losses[second])
        # NaN is larger than anything: it must not hide behind a comparison.
        at = max(values, key=lambda step: (values[step] != values[step], values[step]))
        found.append(
            Difference(
                first,
                second,
                largest=values[at],
                at=at,
                mean=sum(values.values()) / len(values),
                begin=next((step for step, value in values.items() if value != 0), 0),
                last=values[max(values)],
            )
        )
    return found


def train(options: Options, line: str) -> dict[int, float]:
    """Train one line through the launcher; return its losses by step."""
    folder = options.folder / line
    command = [sys.executable, "-P", "-m", "torchtitan_dmuon.launch", "--config", options.config]
    command += ["--line", line, "--training.steps", str(options.steps)]
    command += ["--metrics.log_freq", "1", "--dump_folder", str(folder)]
    environment = {**os.environ, "NGPU": str(options.ranks), "PYTHONPATH": _path()}
    start = time.monotonic()
    print(
        f"line {line}: {options.steps} steps on {options.ranks} ranks", file=sys.stderr, flush=True
    )
    with (options.folder / f"{line}.log").open("w") as log:
        ended = subprocess.run(
            command, env=environment, stdout=log, stderr=log, timeout=PATIENCE_SECONDS, check=False
        )
    if ended.returncode:
        text = (options.folder / f"{line}.log").read_text()
        raise SystemExit(f"line {line} ended with status {ended.returncode}:\n{text[-3000:]}")
    found = read_losses(folder)
    if sorted(found) != list(range(1, options.steps + 1)):
        raise SystemExit(f"line {line}: losses of {len(found)} steps, expected {options.steps}")
    seconds = time.monotonic() - start
    print(f"line {line}: last loss {found[options.steps]:.6f}, {seconds:.0f} s", file=sys.stderr)
    return found


def read_losses(folder: Path) -> dict[int, float]:
    """Return the losses by step that a job wrote to TensorBoard somewhere below its folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[int, float] = {}
    for file in folder.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        if LOSS in events.Tags()["scalars"]:
            found.update({event.step: event.value for event in events.Scalars(LOSS)})
    return found


def table(losses: dict[str, dict[int, float]], differences: list[Difference]) -> str:
    """Return losses and differences as two tables for people."""
    steps = max(next(iter(losses.values())))
    shown = sorted({1, *(steps * part // 8 or 1 for part in range(1, 9))})
    rows = ["| step | " + " | ".join(losses) + " |", "|---" * (len(losses) + 1) + "|"]
    for step in shown:
        rows.append(f"| {step} | " + " | ".join(f"{v[step]:.6f}" for v in losses.values()) + " |")
    rows += [
        "",
        "| lines | largest | at step | mean | first at step | last step |",
        "|---" * 6 + "|",
    ]
    for d in differences:
        at = d.at if d.begin else "-"
        rows.append(
            f"| {d.first}, {d.second} | {d.largest:.2e} | {at} | {d.mean:.2e} | "
            f"{d.begin or '-'} | {d.last:.2e} |"
        )
    return "\n".join(rows)


def draw(losses: dict[str, dict[int, float]], picture: Path) -> None:
    """Draw the losses together, and beside them their relative differences."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
    for index, (line, values) in enumerate(losses.items()):
        # Later lines are thinner, so that those below them show.
        width = 1.0 + 2.0 * (len(losses) - 1 - index)
        left.plot(list(values), list(values.values()), color=COLOURS[line], lw=width, label=line)
    left.set(title="loss", xlabel="step", ylabel="cross-entropy per token")
    left.legend(title="line", fontsize=8)
    for first, second in combinations(losses, 2):
        values = relative(losses[first], losses[second])
        shown = {step: value for step, value in values.items() if value > 0}
        label = f"{first}, {second}" + ("" if shown else ": equal at every step")
        # Open rings, larger for earlier pairs: pairs that differ alike stay visible.
        size = 3 + 2 * (len(losses) - list(losses).index(second))
        right.plot(
            list(shown),
            list(shown.values()),
            "o",
            ms=size,
            mfc="none",
            mew=0.7,
            color=COLOURS[second],
            label=label,
        )
    right.set(title="relative difference of two lines", xlabel="step", yscale="log")
    right.legend(title="lines", fontsize=8)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)


def _path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def main() -> int:
    """Entry point. Exit status: 0, 1 lines differ by more than the bound, 2 bad arguments."""
    options = tyro.cli(Options, use_underscores=True)
    lines = options.lines.split(",")
    problem = None
    if len(set(lines)) != len(lines) or len(lines) < 2 or not set(lines) <= COLOURS.keys():
        problem = f"--lines {options.lines}: expected two or more of {', '.join(COLOURS)}"
    elif min(options.ranks, options.steps) < 1:
        problem = "expected --ranks and --steps of at least 1"
    elif options.folder.exists():
        problem = f"--folder {options.folder}: exists already; expected a new folder"
    elif options.picture is not None and options.picture.suffix not in (".png", ".svg"):
        problem = f"--picture {options.picture}: expected a .png or .svg"
    if options.picture is not None and problem is None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            problem = "--picture needs matplotlib: scripts/setup_env.py --extra docs"
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    options.folder.mkdir(parents=True)
    losses = {line: train(options, line) for line in lines}
    differences = compare(losses)
    print(table(losses, differences))
    if options.json is not None:
        record = {
            "losses": losses,
            "differences": [
                {name: getattr(d, name) for name in Difference.__slots__} for d in differences
            ],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.picture is not None:
        draw(losses, options.picture)
    far = [d for d in differences if not d.largest <= options.bound]
    for d in far:
        print(
            f"error: {d.first} and {d.second} differ by {d.largest:.2e} at step {d.at}, "
            f"expected at most {options.bound:g}",
            file=sys.stderr,
        )
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
