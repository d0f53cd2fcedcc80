"""A run of several parts in a bounded time, with a report that is always complete on disk.

Each part runs in a process of its own with a bound on its time, so one that hangs or breaks the
device costs no other. The report is rewritten, atomically, whenever a part has something new.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

NO_TIME = "left out: no time left"
CUT_OFF = "left out: the run was cut off"
POLL_SECONDS = 0.25
GRACE_SECONDS = 8.0
"""Between the request to end and the kill: the launcher gives its ranks five seconds."""

Results = dict[str, Any]
Note = Callable[[Results], None]
Outcome = tuple[bool, str]


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
    """The report and its file.

    Args:
        path: Of the file.
        budget: Of the run.
        about: Further entries at the top.
    """

    def __init__(self, path: Path, budget: Budget, about: Mapping[str, Any]) -> None:
        self._path = path
        self._budget = budget
        self.content: dict[str, Any] = {
            **about,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds_allowed": budget.seconds,
            "seconds": 0.0,
            "finished": False,
            "parts": {},
        }

    def set(self, name: str, **entry: Any) -> None:
        """Add to a part's entry, and write the file: readers see all of it or the one before."""
        new: Results = {
            "ok": None,
            "reason": "",
            "seconds": 0.0,
            "bound_seconds": None,
            "results": {},
        }
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
    """Return the value with infinities and NaNs as text."""
    if isinstance(value, dict):
        return {str(key): finite(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [finite(x) for x in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


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


def stop(process: SpawnProcess) -> None:
    """End a part's process and all it has started, with a bound."""
    group = process.pid
    assert group is not None  # it has been started
    for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, 2.0)):
        end = time.monotonic() + seconds
        signalled(group, number)
        if number == signal.SIGKILL:
            process.kill()  # it may not have come to have a group
        # The group outlives its leader: a launcher, say, that still has ranks to end.
        while (process.is_alive() or signalled(group, 0)) and time.monotonic() < end:
            process.join(POLL_SECONDS)
            time.sleep(0.0 if process.is_alive() else POLL_SECONDS)


def signalled(group: int, number: int) -> bool:
    """Signal a process group, 0 just to see; return whether there is one."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


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
            try:
                run(part, dataclasses.replace(context, seconds=bound))
            except KeyboardInterrupt:
                for later in parts[i + 1 :]:
                    report.set(later.name, ok=False, reason=CUT_OFF)
                raise
        print(line(part.name, report.content["parts"][part.name]), flush=True)
    report.content["finished"] = True
    report.write()


def line(name: str, entry: Mapping[str, Any]) -> str:
    said = "ok" if entry["ok"] else "NOT OK"
    return f"{name:<14} {said:<7} {entry['seconds']:>6.1f} s  {entry['reason']}".rstrip()
