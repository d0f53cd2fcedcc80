"""Peak memory of Table 2(b) of the DMuon-2 paper (arXiv:2611.07084v2), and what the planner says.

GiB per GPU as nvidia-smi showed them, on H100 80GB, of lines A, C and D.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torchtitan_dmuon.config.manager import load_job
from torchtitan_dmuon.planner.estimate import make_plan
from torchtitan_dmuon.planner.setting import Setting

GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement and its prediction."""

    config: str
    gpus: int
    line: str
    printed: float
    planned: float

    @property
    def off(self) -> float:
        return self.planned / self.printed - 1


def rows(lines: str = "AD", *, every: bool = True) -> Iterator[Row]:
    """Plan the rows of the table that have a figure for these lines; or the ends of its scale."""
    with Path(__file__).with_name("published_memory.csv").open(newline="") as file:
        for entry in csv.DictReader(file):
            gpus = int(entry["gpus"])
            for line in lines:
                if entry[line] and (every or gpus in (16, 256)):
                    peak = _peak(entry["config"], gpus, line)
                    yield Row(entry["config"], gpus, line, float(entry[line]), peak)


@cache
def _peak(config: str, gpus: int, line: str) -> float:
    job = load_job(["--config", f"{config}.toml", "--line", line])
    setting = Setting(nodes=gpus // GPUS_PER_NODE, gpus_per_node=GPUS_PER_NODE)
    return make_plan(job.config, setting).memory_gib.peak
