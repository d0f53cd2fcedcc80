"""Chrome traces of training steps, by torch.profiler, with the communication threads in them.

    with dmuon.profile("traces", schedule=torch.profiler.schedule(wait=5, warmup=2, active=1)) as p:
        for batch in batches:
            ...
            p.step()

`dmuon timeline traces` draws them; docs/timeline.md has the names of the ranges.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_dmuon.arguments import expect, is_count

FOLDER = "iteration_{step}"
FILE = "rank{rank}_trace.json.gz"


def profile(
    folder: str | Path,
    *,
    schedule: Callable[[int], Any],
    first_step: int = 1,
    written: Callable[[Path], None] = lambda path: None,
) -> torch.profiler.profile:
    """Return a profiler that writes FOLDER/iteration_N/rankR_trace.json.gz after step N.

    It is a context manager; call its `step()` after every training step. Unlike one that is made by
    hand it records all threads: on CPUs communication runs on its own. Steps have their numbers in
    the trace, as `ProfilerStep#N`.

    Args:
        folder: For all ranks, which have been initialised; made if it is not there.
        schedule: Which steps are recorded, as `torch.profiler.schedule` returns it: a function of
            a step's number less one.
        first_step: Number of the first step; more than 1 after a resume.
        written: Called with each file that is complete.

    Raises:
        ValueError: first_step is not at least 1.
        OSError: the folder cannot be made, or a file not be written (in `step`, or at the end).
    """
    expect("first_step", first_step, lambda n: is_count(n, 1), "an integer >= 1")
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    rank = dist.get_rank() if dist.is_initialized() else 0
    saved: set[int] = set()

    def save(profiler: torch.profiler.profile) -> None:
        finished = profiler.step_num - 1
        # Called at the end of the job too, for the step that never came: the file would lose its.
        if finished in saved:
            return
        saved.add(finished)
        path = root / FOLDER.format(step=finished) / FILE.format(rank=rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Under another name until it is whole: nobody may read half of it. torch compresses .gz.
        part = path.with_name(f".{path.name.removesuffix('.json.gz')}.part.json.gz")
        try:
            profiler.export_chrome_trace(str(part))
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        written(path)

    kinds = torch.profiler.ProfilerActivity
    result = torch.profiler.profile(
        activities=[kinds.CPU, kinds.CUDA] if torch.cuda.is_available() else [kinds.CPU],
        # torch asks for step 0 once, when the profiler is made: what it begins with.
        schedule=lambda step: schedule((step or first_step) - 1),
        on_trace_ready=save,
        record_shapes=True,
        experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
    )
    result.step_num = first_step
    return result
