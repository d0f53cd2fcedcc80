"""torchtitan's profiler section, with traces that show communication threads too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchtitan.tools import profiler as titan

from torchtitan_dmuon.log import logger
from torchtitan_dmuon.tracing import profile


class Profiler(titan.Profiler):
    """torchtitan's, whose traces have all threads and the trainer's step numbers."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Profiler.Config):
        pass

    def build_torch_profiler(self, *, global_step: int, base_folder: str, leaf_folder: str) -> Any:
        """Create and start the profiler; None if it is off."""
        config = self._config
        if not config.enable_profiling:
            return None
        folder = Path(base_folder, config.save_traces_folder)
        post_process = config.trace_post_processor.build() if config.trace_post_processor else None

        def written(path: Path) -> None:
            if post_process:
                post_process(str(path))
            logger.info("trace: %s (dmuon timeline %s draws it)", path, path.parent)

        optional = {
            "repeat": config.profiler_repeat,
            "skip_first": config.profiler_skip_first,
            "skip_first_wait": config.profiler_skip_first_wait,
        }
        schedule = torch.profiler.schedule(
            wait=config.profile_freq - config.profiler_active - config.profiler_warmup,
            warmup=config.profiler_warmup,
            active=config.profiler_active,
            **{key: value for key, value in optional.items() if value is not None},
        )
        # The leaf folder is for replicas of fault-tolerant training, each with its own rank 0.
        result = profile(
            folder / leaf_folder, schedule=schedule, first_step=global_step + 1, written=written
        )
        result.__enter__()
        return result
