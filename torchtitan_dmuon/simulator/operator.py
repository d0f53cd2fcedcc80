"""What one call of an operator, or a publish, costs on a described cluster."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from torchtitan_dmuon.native.segments import Segment, aligned
from torchtitan_dmuon.simulator.binding import Links, Outcome, Run, simulate
from torchtitan_dmuon.simulator.cluster import Cluster
from torchtitan_dmuon.simulator.publish import PublishRun, simulate_publish

_ELEMENT = 2

LINKS = ("nic_out", "nic_in", "nvlink_out", "nvlink_in")


@dataclass(frozen=True, slots=True)
class Load:
    """Bytes of one kind of link over all GPUs.

    Attributes:
        busiest: Of the GPU with the most.
        mean: Of all GPUs.
    """

    busiest: int
    mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a call costs; the fields are the keys of the JSON (docs/simulator.md).

    Attributes:
        version: Of the keys' meaning.
        operation: "allgatherv", "reducescatterv" or "publish".
        cluster: Its name.
        gpus: All GPUs.
        nodes: Nodes.
        bytes: Sum of the segments' lengths; of a publish those of one rail.
        segments: Segments, or tasks of one rail.
        ms: From launch until the slowest GPU is done, in milliseconds.
        path: "node" (one node), "star" or "chain".
        blocks: Thread blocks per GPU.
        seed: Of the random delays.
        delay_us: Their usual limit; 0: none.
        links: Per kind of link the load.
        ranks: Per GPU, node by node: when it is done, and the bytes of its links. Of a publish the
            GPUs of one rail.
        update_ms: Publish: when the last task was ready. 0: all were before the launch.
    """

    version: int
    operation: str
    cluster: str
    gpus: int
    nodes: int
    bytes: int
    segments: int
    ms: float
    path: str
    blocks: int
    seed: int
    delay_us: float
    links: dict[str, Load]
    ranks: list[dict[str, float]]
    update_ms: float = 0.0

    def to_json(self) -> str:
        """Return the prediction as JSON."""
        return json.dumps(asdict(self), indent=1)


def segments_of(
    total: int, lengths: Sequence[int], owners: Sequence[tuple[int, int]]
) -> list[Segment]:
    """Return one segment per owner, laid one behind the other.

    Args:
        total: Bytes of all, even.
        lengths: Their ratios; they repeat.
        owners: Node and rail of each.
    """
    shares = [lengths[i % len(lengths)] for i in range(len(owners))]
    whole, before, offset = sum(shares), 0, 0
    segments = []
    for (node, rail), share in zip(owners, shares, strict=True):
        begin = total * before // whole // _ELEMENT * _ELEMENT
        before += share
        nbytes = total * before // whole // _ELEMENT * _ELEMENT - begin
        segments.append(Segment(offset, nbytes, node, rail))
        offset += aligned(nbytes)
    return segments


def predict(
    operation: str,
    cluster: Cluster,
    nodes: int,
    segments: Sequence[Segment],
    *,
    seed: int = 0,
    delay_us: float = 0.0,
    progress: Callable[[float], None] | None = None,
) -> Prediction:
    """Simulate one call, launched on all GPUs at the same time.

    Args:
        operation: "allgatherv" or "reducescatterv", of bfloat16 elements.
        cluster: What it costs.
        nodes: Nodes of cluster.gpus_per_node GPUs.
        segments: The table.
        seed: Of random delays.
        delay_us: Delays every operation at random up to this, now and then 16 times longer.
        progress: Called now and then with the share that is done, 0 to 1.

    Raises:
        ValueError: a mistake in the table; the message names the segment.
        NativeError: the simulator cannot be compiled.
    """
    ends = [s.offset + s.bytes for s in segments]
    homes = [s.home + s.bytes for s in segments]
    outcome = simulate(
        Run(
            operation=operation,
            nodes=nodes,
            rails=cluster.gpus_per_node,
            buffer_bytes=aligned(max(ends)),
            home_bytes=aligned(max(homes)),
            seed=seed,
            delay_us=delay_us,
        ),
        cluster.costs,
        [segments],
        progress=progress,
    )
    return _prediction(operation, cluster, nodes, segments, outcome, seed, delay_us)


def predict_publish(
    cluster: Cluster,
    nodes: int,
    tasks: Sequence[Segment],
    *,
    update_ms: float = 0.0,
    seed: int = 0,
    delay_us: float = 0.0,
    progress: Callable[[float], None] | None = None,
) -> Prediction:
    """Simulate the publish of one step on one rail, launched on all its GPUs at the same time.

    Args:
        cluster: What it costs.
        nodes: GPUs of the rail.
        tasks: What is published, of rail 0; one node's in the order of its updates.
        update_ms: Every owner's tasks become ready one after the other, evenly over this time. 0:
            all before the launch.
        seed: Of random delays.
        delay_us: Delays every operation at random up to this, now and then 16 times longer.
        progress: Called now and then with the share that is done, 0 to 1.

    Raises:
        ValueError: a mistake in the tasks; the message names the task.
        NativeError: the simulator cannot be compiled.
    """
    run = PublishRun(
        nodes=nodes,
        buffer_bytes=aligned(max((t.offset + t.bytes for t in tasks), default=0)),
        seed=seed,
        delay_us=delay_us,
    )
    ready_us = _ready(tasks, nodes, 1e3 * update_ms)
    outcome = simulate_publish(run, cluster.costs, tasks, ready_us, progress=progress)
    found = _prediction("publish", cluster, nodes, tasks, outcome, seed, delay_us)
    return replace(found, update_ms=update_ms)


def _ready(tasks: Sequence[Segment], nodes: int, update_us: float) -> list[float]:
    """Return when each task is ready."""
    counts = [sum(t.node == node for t in tasks) for node in range(nodes)]
    done = [0] * nodes
    ready = []
    for task in tasks:
        if 0 <= task.node < nodes:  # else the simulator names it
            done[task.node] += 1
            ready.append(update_us * done[task.node] / counts[task.node])
        else:
            ready.append(0.0)
    return ready


def _prediction(
    operation: str,
    cluster: Cluster,
    nodes: int,
    segments: Sequence[Segment],
    outcome: Outcome,
    seed: int,
    delay_us: float,
) -> Prediction:
    return Prediction(
        version=1,
        operation=operation,
        cluster=cluster.name,
        gpus=nodes * cluster.gpus_per_node,
        nodes=nodes,
        bytes=sum(s.bytes for s in segments),
        segments=len(segments),
        ms=outcome.ms,
        path="star" if outcome.star else "chain" if nodes > 1 else "node",
        blocks=outcome.groups,
        seed=seed,
        delay_us=delay_us,
        links={kind: _load(outcome.links, kind) for kind in LINKS},
        ranks=[
            {"ms": ms, **asdict(links)}
            for ms, links in zip(outcome.rank_ms, outcome.links, strict=True)
        ],
    )


def _load(links: Sequence[Links], kind: str) -> Load:
    get: Callable[[Links], int] = lambda x: int(getattr(x, kind))  # noqa: E731
    return Load(busiest=max(map(get, links)), mean=sum(map(get, links)) / len(links))
