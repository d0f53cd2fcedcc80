#!/usr/bin/env python3
"""What only a GPU can show, in a few minutes: device_check.sh runs this; see --help and `KEYS`.

Each part runs in a process of its own with a bound on its time, so one that hangs or breaks the
device costs no other. The report is rewritten, atomically, whenever a part has something new.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import tyro  # noqa: E402

from torchtitan_dmuon.config.errors import ConfigError  # noqa: E402

FORMAT = 1
NO_TIME = "left out: no time left"
POLL_SECONDS = 0.25
GRACE_SECONDS = 8.0
"""Between the request to end and the kill: the launcher gives its ranks five seconds."""
CLOSING_SECONDS = 10.0
"""Of the whole time, kept for stopping the last part."""

Results = dict[str, Any]
Note = Callable[[Results], None]
Outcome = tuple[bool, str]

KEYS = {
    "format": "version of this layout",
    "keys": "this table",
    "rehearsal": "true: toy sizes on a CPU; no figure means anything",
    "started": "UTC",
    "seconds_allowed": "of all parts together",
    "seconds": "taken so far",
    "finished": "false in a report of a run that was cut off",
    "parts": "by name, in the order in which they run",
    "parts.*.ok": "true, false, or null while the part runs",
    "parts.*.reason": "why it is not ok, or what a part that is ok left out; else empty",
    "parts.*.seconds": "taken",
    "parts.*.bound_seconds": "after which the part is ended",
    "parts.*.results": "what the part found, also if it was ended",
    "parts.environment.results": "device, driver, versions, commit; doctor: dmuon doctor --json",
    "parts.csrc.results": "the build of the communication kernels",
    "parts.gpu_tests.results": "counts by outcome; failures: test and message; not_run: tests "
    "that were still to come when the part was ended (null: not known)",
    "parts.backends.results": "limit: largest allowed ratio; entries: per symmetric product the "
    "errors of torch's product against float64 on the device (max relative to the largest element, "
    "rms relative to the rms), and of each backend the ratio of its errors to those, or why not",
    "parts.newton_schulz.results": "product_tflops: measured rate; shapes: rows, columns, method, "
    "seconds of ours, over_floor (seconds over flops / rate), replayed (ours ran as a CUDA graph), "
    "each other candidate's seconds, over_ours (its time over ours, median within a round) and "
    "iqr, failed (by candidate), goals (met, missed, not asked for, not measured), "
    "compiled_reference (what became of gram-newton-schulz under torch.compile); summary: shapes "
    "by goal and verdict; choices: the backends chosen",
    "parts.training.results": "arguments of the launcher; losses, step_seconds, tokens_per_second "
    "per step; median_step_seconds after the first steps; peak_memory_gib, peak_reserved_gib",
}
"""What a report has. A * stands for any name."""


@dataclass(kw_only=True, slots=True)
class Options:
    """Check on one Hopper GPU, in minutes, what no CPU can show, and write one JSON report:
    versions, GPU tests, symmetric products against float64, times of Newton-Schulz against its
    floor and against others, and 20 training steps.

    A part that would not fit into the time is left out, and the report says so. Exit status: 0 all
    parts are ok; 1 one is not, or was left out; 2 bad arguments or no GPU.
    """

    output: str = "device_check.json"
    """Report to write, ending in .json. The parts' own output goes beside it, ending in .log."""

    minutes: int = 5
    """Time for all parts together, 1 to 60."""

    rehearse: bool = False
    """Run the same parts on the CPU at toy sizes, to try this script; no figure means anything."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a part is told.

    Attributes:
        rehearse: Toy sizes, on the CPU.
        work: Folder for files that no one needs afterwards.
        seconds: After which the part is ended; it orders its work so that what matters is first.
    """

    rehearse: bool
    work: Path
    seconds: float


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the run.

    Attributes:
        run: Gives `note` all it has found so far, as often as it likes; returns ok and the reason.
        least: Seconds below which it is not worth a start.
    """

    name: str
    run: Callable[[Context, Note], Outcome]
    least: float


class Budget:
    """Deals out the time of a run.

    Args:
        seconds: For all parts.
        clock: Seconds that only ever grow.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._start = clock()

    def spent(self) -> float:
        return self._clock() - self._start

    def bound(self, least: float, later: float) -> float | None:
        """Return how long a part may take, or None if there is too little time for it.

        A part may have all but what the later ones need at least, and its own least in any case.
        """
        left = self.seconds - self.spent()
        return None if left < least else min(left, max(least, left - later))


class Report:
    """The report and its file."""

    def __init__(self, path: Path, budget: Budget, *, rehearse: bool) -> None:
        self._path = path
        self._budget = budget
        self.content: dict[str, Any] = {
            "format": FORMAT,
            "keys": KEYS,
            "rehearsal": rehearse,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds_allowed": budget.seconds,
            "seconds": 0.0,
            "finished": False,
            "parts": {},
        }

    def set(self, name: str, **entry: Any) -> None:
        """Add to a part's entry, and write the file: readers see all of it or the one before."""
        new = {"ok": None, "reason": "", "seconds": 0.0, "bound_seconds": None, "results": {}}
        self.content["parts"].setdefault(name, new).update(entry)
        self.write()

    def write(self) -> None:
        self.content["seconds"] = round(self._budget.spent(), 1)
        write_json(self._path, self.content)


def write_json(path: Path, content: Any) -> None:
    """Replace a file by one with this content; infinity and NaN, which JSON lacks, as text."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(finite(content), file, indent=1, allow_nan=False)
            file.write("\n")
        # mkstemp's 0600 would hide the report from others.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): finite(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [finite(x) for x in value]
    return str(value) if isinstance(value, float) and abs(value) in (float("inf"),) or (
        isinstance(value, float) and value != value
    ) else value


# --------------------------------------------------------------------------------- running a part


def child(part: Part, context: Context, found: Path, log: Path) -> None:
    """Run a part in this process, which is its own, and leave what it says in `found`."""
    # A group of its own, so that the parent can end what the part has started, too.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Should the parent be killed, this ends nevertheless.
    signal.alarm(int(context.seconds + 2 * GRACE_SECONDS) + 1)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    print(f"==== {part.name}", flush=True)
    latest: Results = {}

    def note(results: Results) -> None:
        latest.clear()
        latest.update(results)
        write_json(found, {"results": results})

    try:
        ok, reason = part.run(context, note)
    except Exception as error:  # Whatever it is, the report says it and the next part runs.
        traceback.print_exc()
        ok, reason = False, f"{type(error).__name__}: {' '.join(str(error).split())}"
    write_json(found, {"results": latest, "ok": ok, "reason": reason})


def execute(part: Part, context: Context, report: Report, log: Path) -> None:
    """Run a part in a process of its own, with the report kept up to date; end it at its bound."""
    found = context.work / f"{part.name}.json"
    start = time.monotonic()
    process = multiprocessing.get_context("spawn").Process(
        target=child, args=(part, context, found, log), daemon=True
    )
    process.start()
    ended, stamp = "", 0
    try:
        while process.is_alive():
            process.join(POLL_SECONDS)
            now = found.stat().st_mtime_ns if found.exists() else 0
            if now != stamp:
                stamp = now
                report.set(part.name, results=json.loads(found.read_text())["results"])
            if time.monotonic() - start > context.seconds:
                ended = f"not done within {context.seconds:.0f} s; ended"
                break
    except KeyboardInterrupt:
        ended = "the run was cut off"
        raise
    finally:
        stop(process)
        last = json.loads(found.read_text()) if found.exists() else {"results": {}}
        died = f"its process ended with status {process.exitcode}; see {log.name}"
        if "ok" not in last:
            last |= {"ok": False, "reason": ended or died}
        report.set(part.name, seconds=round(time.monotonic() - start, 1), **last)


def stop(process: Any) -> None:
    """End a part's process and all it has started, with a bound."""
    for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, 2.0)):
        # The group outlives its leader where the part left something behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        if process.is_alive() and number == signal.SIGKILL:
            process.kill()  # It may not have come to have a group.
        process.join(seconds)
    process.close if process.exitcode is None else None  # noqa: B018


def run_parts(
    parts: Sequence[Part],
    context: Context,
    report: Report,
    budget: Budget,
    run: Callable[[Part, Context], None],
) -> None:
    """Run the parts that fit into the time, in order; the report names the others."""
    for i, part in enumerate(parts):
        bound = budget.bound(part.least, sum(later.least for later in parts[i + 1 :]))
        if bound is None:
            report.set(part.name, ok=False, reason=NO_TIME)
        else:
            report.set(part.name, bound_seconds=round(bound, 1))
            run(part, dataclasses.replace(context, seconds=bound))
        print(line(part.name, report.content["parts"][part.name]), flush=True)
    report.content["finished"] = True
    report.write()


def line(name: str, entry: Mapping[str, Any]) -> str:
    said = "ok" if entry["ok"] else "NOT OK"
    return f"{name:<14} {said:<7} {entry['seconds']:>6.1f} s  {entry['reason']}".rstrip()


# -------------------------------------------------------------------------------------- arguments


def check_options(options: Options) -> Path:
    """Return the report's path. Raises ConfigError."""
    if not 1 <= options.minutes <= 60:
        raise ConfigError(f"--minutes: expected a number from 1 to 60, got {options.minutes}")
    path = Path(options.output).absolute()
    if path.suffix != ".json":
        raise ConfigError(f'--output: expected a file that ends in .json, got "{options.output}"')
    if not path.parent.is_dir():
        raise ConfigError(f"--output: no such folder: {path.parent}")
    return path


def need_gpu() -> None:
    """Raise ConfigError if there is none."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "needs a CUDA GPU (found none); --rehearse runs the same parts on the CPU at toy sizes"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    options = tyro.cli(Options, args=arguments)
    budget = Budget(60.0 * options.minutes - CLOSING_SECONDS)
    try:
        path = check_options(options)
        if not options.rehearse:
            need_gpu()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from device_check_parts import PARTS

    # Parts and what they start use this checkout, and see no GPU in a rehearsal.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    )
    if options.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # The outer bound of device_check.sh: as Ctrl-C, what there is gets written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    report = Report(path, budget, rehearse=options.rehearse)
    log = path.with_suffix(".log")
    log.unlink(missing_ok=True)
    work = Path(tempfile.mkdtemp(prefix="device_check_"))
    try:
        context = Context(options.rehearse, work, budget.seconds)
        run_parts(PARTS, context, report, budget, lambda p, c: execute(p, c, report, log))
    except KeyboardInterrupt:
        print(f"cut off; {path} has what was found until now", file=sys.stderr)
        return 130
    finally:
        report.write()
        shutil.rmtree(work, ignore_errors=True)
    print(f"{path}{' (a rehearsal: no figure in it means anything)' if options.rehearse else ''}")
    return 0 if all(entry["ok"] for entry in report.content["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
