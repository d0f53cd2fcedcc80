"""The publish's times in the DMuon-2 paper, and the simulator's."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torchtitan_dmuon.config.manager import load_job
from torchtitan_dmuon.native.segments import Segment, aligned
from torchtitan_dmuon.planner.estimate import make_plan
from torchtitan_dmuon.planner.setting import Setting
from torchtitan_dmuon.simulator.cluster import Cluster
from torchtitan_dmuon.simulator.operator import Prediction, predict_publish

FILE = Path(__file__).with_name("published_publish.csv")
MIB = 2**20


@dataclass(frozen=True, slots=True)
class PublishRow:
    """A printed figure of table 7: all publish tasks of a step on one rail of a model.

    Attributes:
        model: Its name.
        config: The shipped config whose owners are taken; empty: there is none.
        count: Printed number of tasks.
        total_mib: Printed MiB of all.
        largest_mib: Printed MiB of the largest.
        nodes: Nodes.
        ms: Printed milliseconds of the paper's kernel.
    """

    model: str
    config: str
    count: int
    total_mib: float
    largest_mib: float
    nodes: int
    ms: float

    def tasks(self) -> list[Segment]:
        """The first rail's units and owners as `dmuon plan` has them for so many nodes. Without a
        config: the largest, and the rest evenly, dealt to the nodes in turn."""
        if self.config:
            return _lay_out(_planned(self.config, self.nodes))
        rest = (self.total_mib - self.largest_mib) / (self.count - 1)
        sizes = [self.largest_mib, *([rest] * (self.count - 1))]
        return _lay_out([(int(s * MIB), i % self.nodes) for i, s in enumerate(sizes)])

    def predict(self, cluster: Cluster) -> Prediction:
        """Simulate it; all tasks are ready before the launch."""
        return predict_publish(cluster, self.nodes, self.tasks())


@cache
def _planned(config: str, nodes: int) -> list[tuple[int, int]]:
    """Return bytes and row of the units of column 0, in the order of the update."""
    job = load_job(["--config", f"{config}.toml", "--line", "D"])
    plan = make_plan(job.config, Setting(nodes=nodes, gpus_per_node=8))
    units = [unit for layer in plan.layers for unit in layer.units if unit.column == 0]
    return [(2 * unit.elements, unit.row) for unit in units if unit.elements]


def _lay_out(sizes: list[tuple[int, int]]) -> list[Segment]:
    tasks, offset = [], 0
    for nbytes, node in sizes:
        tasks.append(Segment(offset, nbytes, node))
        offset += aligned(nbytes)
    return tasks


def publish_rows() -> Iterator[PublishRow]:
    """Yield table 7."""
    with FILE.open() as file:
        for line in csv.DictReader(file):
            yield PublishRow(
                line["model"],
                line["config"],
                int(line["tasks"]),
                float(line["total_mib"]),
                float(line["largest_mib"]),
                int(line["nodes"]),
                float(line["ms"]),
            )
