"""The operators' times in the DMuon-2 paper, and the simulator's."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchtitan_dmuon.native.segments import Segment
from torchtitan_dmuon.simulator.cluster import Cluster
from torchtitan_dmuon.simulator.operator import Prediction, predict, segments_of

FILE = Path(__file__).with_name("published_operators.csv")


@dataclass(frozen=True, slots=True)
class Row:
    """A printed figure: of one operator, GPUs, bytes of a call, and milliseconds."""

    operation: str
    gpus: int
    nbytes: int
    ms: float

    def segments(self, nodes: int) -> list[Segment]:
        """One owner per node and lengths that cycle 1:2:3, as in the paper's appendix D.3."""
        return segments_of(self.nbytes, (1, 2, 3), [(node, 0) for node in range(nodes)])

    def predict(self, cluster: Cluster) -> Prediction:
        """Simulate the call."""
        nodes = self.gpus // cluster.gpus_per_node
        return predict(self.operation, cluster, nodes, self.segments(nodes))


def rows() -> Iterator[Row]:
    """Yield tables 5 and 6 (AllGatherV, ReduceScatterV)."""
    with FILE.open() as file:
        for line in csv.DictReader(file):
            yield Row(line["operation"], int(line["gpus"]), int(line["bytes"]), float(line["ms"]))
