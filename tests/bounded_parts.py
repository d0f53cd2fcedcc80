"""Parts that go wrong, each run in a process of its own, which imports no more than this."""

from __future__ import annotations

import math
import os
import subprocess
import time

from torchtitan_dmuon.bench.bounded import Context, Note, Outcome


def good(context: Context, note: Note) -> Outcome:
    note({"figure": math.nan})
    return True, ""


def raises(context: Context, note: Note) -> Outcome:
    note({"before": 1})
    raise ValueError("no such\nkernel")


def dies(context: Context, note: Note) -> Outcome:
    note({"before": 2})
    os._exit(77)


def hangs(context: Context, note: Note) -> Outcome:
    sleeper = subprocess.Popen(["sleep", "600"])
    note({"before": 3, "pid": sleeper.pid})
    time.sleep(600)
    return True, ""
