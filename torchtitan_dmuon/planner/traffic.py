"""Bytes that a GPU sends in a step, inside its node and across nodes (paper sections 3.2 and 4.4).

Logical volumes: what a bandwidth-optimal algorithm moves, averaged over the ranks. The runtime's
operators and NCCL's rings move the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_dmuon.planner.plan import Traffic


@dataclass(frozen=True, slots=True)
class Network:
    """Ranks and the nodes they are on. Rank r K + s is in row r and column s.

    Attributes:
        rows: R, replicas.
        columns: K, what a layer is gathered over.
        gpus_per_node: Consecutive ranks of a node.
    """

    rows: int
    columns: int
    gpus_per_node: int

    def in_rows(self, bytes_: float) -> tuple[float, float]:
        """Return what gathering or scattering `bytes_` over a row sends, (inside, across)."""
        far = self._mean_nodes(self.rows, self.columns, stride=1)
        return bytes_ * (self.columns - far) / self.columns, bytes_ * (far - 1) / self.columns

    def in_columns(self, bytes_: float) -> tuple[float, float]:
        """Return what passing `bytes_` once down the columns sends, a rank's share of it.

        R - 1 hops over the R K ranks together; those between rows of one node stay inside.
        """
        far = self._mean_nodes(self.columns, self.rows, stride=self.columns)
        ranks = self.rows * self.columns
        return bytes_ * (self.rows - far) / ranks, bytes_ * (far - 1) / ranks

    def _mean_nodes(self, lines: int, members: int, *, stride: int) -> float:
        """Return on how many nodes the ranks of a row, or of a column, are, mean over all of them.

        Every node but one receives the bytes once from another node, its other ranks inside it.
        """
        if members == 1 or stride > self.gpus_per_node:
            return members
        # From one rank of a line to the next the node is the same or the following one.
        begins = range(0, lines * members, members) if stride == 1 else range(lines)
        reach = (members - 1) * stride
        per = self.gpus_per_node
        return 1 + sum((first + reach) // per - first // per for first in begins) / lines


@dataclass(frozen=True, slots=True)
class Volumes:
    """What is moved.

    Attributes:
        mode: fsdp, gather or owner.
        layers: Elements of the layers.
        rest: Elements outside.
        matrices: Elements of the matrices.
        param_bytes: Bytes of an element that is gathered or published.
        reduce_bytes: Bytes of an element of a gradient.
        gathers: Gathers per micro-batch: 2 for ZeRO-3, else 1.
        micro_batches: Micro-batches of a step.
    """

    mode: str
    layers: int
    rest: int
    matrices: int
    param_bytes: int
    reduce_bytes: int
    gathers: int
    micro_batches: int


def traffic(network: Network, v: Volumes) -> Traffic:
    """Return the bytes of a step."""

    def gather(elements: int) -> tuple[float, float]:
        inside, across = network.in_rows(elements * v.param_bytes)
        times = v.gathers * v.micro_batches
        return inside * times, across * times

    def reduce(elements: int, hops: int) -> tuple[float, float]:
        # Every micro-batch is reduced to the end: owners add it up, and shards do.
        inside, across = network.in_rows(elements * v.reduce_bytes)
        down_inside, down_across = network.in_columns(elements * v.reduce_bytes)
        return (
            v.micro_batches * (inside + hops * down_inside),
            v.micro_batches * (across + hops * down_across),
        )

    # An all-reduce is both halves; owners take the first, and publish in place of the second.
    hops = 1 if v.mode == "owner" else 2
    gathered, reduced = gather(v.layers), reduce(v.layers, hops)
    rest_gathered, rest_reduced = gather(v.rest), reduce(v.rest, 2)
    published, optimizer = (0.0, 0.0), (0.0, 0.0)
    if v.mode == "owner":
        published = network.in_columns(v.layers * v.param_bytes)
    if v.mode == "gather":
        # Gradient and momentum of every matrix, in float32, on every rank of the row.
        optimizer = network.in_rows(v.matrices * 8)
    return Traffic(
        gather_inside=gathered[0],
        gather_across=gathered[1],
        reduce_inside=reduced[0],
        reduce_across=reduced[1],
        publish_inside=published[0],
        publish_across=published[1],
        rest_inside=rest_gathered[0] + rest_reduced[0],
        rest_across=rest_gathered[1] + rest_reduced[1],
        optimizer_inside=optimizer[0],
        optimizer_across=optimizer[1],
    )
