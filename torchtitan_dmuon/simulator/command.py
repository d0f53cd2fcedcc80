"""`dmuon simulate`: what the operators cost on a cluster that is described, not there."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

import tyro

from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.native.build import NativeError

if TYPE_CHECKING:
    from torchtitan_dmuon.simulator.cluster import Cluster
    from torchtitan_dmuon.simulator.operator import Prediction

_MOST_GPUS = 8192
_MOST_BYTES = 2**36
_MOST_TASKS = 65536
_MOST_UPDATE_MS = 10_000
_MOST_NODES = 1024
_MOST_PER_NODE = 72
"""As kMaxNodes and kMaxRails of csrc/core/types.h."""

_QUIET_SECONDS = 2.0


@dataclass(kw_only=True, slots=True)
class Options:
    """Predict what one gather, reduction or publish of owned matrices takes on a described cluster,
    and what every link carries: the scheduling code that runs on GPUs, under a virtual clock.

    dmuon simulate operator --op allgatherv --gpus 256 --bytes 1073741824

    The first run compiles the simulator (some seconds; needs g++). No GPU is needed. 256 GPUs and
    1 GiB take seconds, 4096 GPUs some minutes. The time is that of one call alone, launched
    everywhere at once, without the computation beside it. docs/simulator.md says how far to trust
    it.
    """

    what: Annotated[str, tyro.conf.Positional] = ""
    """What is simulated: operator."""

    op: Literal["allgatherv", "reducescatterv", "publish"] = "allgatherv"
    """allgatherv: every GPU gets the owners' segments. reducescatterv: owners get their sums.
    publish: owners give the tasks of a step to the GPUs of their rail on all other nodes."""

    gpus: int = 256
    """GPUs of the cluster."""

    bytes: int = 1073741824
    """Bytes of one call: the sum of all segments; of a publish, of the tasks of one rail."""

    tasks: int = 0
    """Publish: tasks of one rail, dealt to their owners in turn. 0: one per owner."""

    update_ms: float = 0.0
    """Publish: every owner's tasks become ready one after the other, evenly over so many
    milliseconds. 0: all are ready before the launch."""

    gpus_per_node: int = 0
    """GPUs of a node. 0: as in the cluster's description."""

    owners: Literal["nodes", "gpus", "one"] = "nodes"
    """Who owns a segment. nodes: the first GPU of every node; gpus: every GPU; one: the first of
    all. Of a publish's rail, nodes and gpus are the same."""

    lengths: str = "1:2:3"
    """Ratios of the segments' lengths, in the order of their owners; they repeat."""

    cluster: str = "h100_400g"
    """What the cluster costs: a name that the package knows, or a .toml file (docs/simulator.md);
    what the file leaves out is as in h100_400g."""

    seed: int = 0
    """Of the random delays."""

    delay_us: float = 0.0
    """Delay every operation at random, up to so many microseconds, now and then 16 times more: how
    much does jitter cost? 0: no delays."""

    json: bool = False
    """Print JSON, with the bytes of every link; docs/simulator.md explains the keys."""


def parse_lengths(text: str) -> list[int]:
    """Return the ratios in `--lengths`.

    Raises:
        ConfigError: not whole numbers with colons between, or all 0.
    """
    if not re.fullmatch(r"\d{1,6}(:\d{1,6}){0,999}", text) or not any(map(int, text.split(":"))):
        raise ConfigError(
            f'--lengths: expected whole numbers with colons, not all 0, e.g. 1:2:3, got "{text}"'
        )
    return [int(x) for x in text.split(":")]


def owners_of(kind: str, nodes: int, per_node: int) -> list[tuple[int, int]]:
    """Return node and rail of each owner."""
    if kind == "one":
        return [(0, 0)]
    rails = range(per_node if kind == "gpus" else 1)
    return [(node, rail) for node in range(nodes) for rail in rails]


def check(options: Options) -> None:
    """Raise ConfigError for what needs no cluster to be wrong."""
    if options.what != "operator":
        got = f', got "{options.what}"' if options.what else ""
        raise ConfigError(f"dmuon simulate: expected operator{got} (see --help)")
    for name, most in (("gpus", _MOST_GPUS), ("bytes", _MOST_BYTES)):
        value = getattr(options, name)
        if not 1 <= value <= most:
            raise ConfigError(f"--{name}: expected 1 to {most}, got {value}")
    if options.bytes % 2:
        raise ConfigError(f"--bytes: expected whole bfloat16 elements, got {options.bytes}")
    if not 0 <= options.seed < 2**63:
        raise ConfigError(f"--seed: expected 0 to 2**63 - 1, got {options.seed}")
    if not 0 <= options.delay_us <= 1000:
        raise ConfigError(f"--delay_us: expected 0 to 1000, got {options.delay_us}")
    if not 0 <= options.tasks <= _MOST_TASKS:
        raise ConfigError(f"--tasks: expected 0 to {_MOST_TASKS}, got {options.tasks}")
    if not 0 <= options.update_ms <= _MOST_UPDATE_MS:
        raise ConfigError(f"--update_ms: expected 0 to {_MOST_UPDATE_MS}, got {options.update_ms}")
    for name in ("tasks", "update_ms"):
        if getattr(options, name) and options.op != "publish":
            raise ConfigError(f"--{name}: only a publish has it (--op publish)")


def mesh_of(options: Options, cluster: Cluster) -> tuple[int, int]:
    """Return the number of nodes, and of GPUs on each.

    Raises:
        ConfigError: the GPUs fill no such cluster.
    """
    own = options.gpus_per_node
    if not 0 <= own <= _MOST_PER_NODE:
        raise ConfigError(f"--gpus_per_node: expected 0 to {_MOST_PER_NODE}, got {own}")
    per_node = own or min(cluster.gpus_per_node, options.gpus)
    if per_node > _MOST_PER_NODE:
        raise ConfigError(
            f"--cluster {options.cluster}: {per_node} GPUs of a node, expected at most "
            f"{_MOST_PER_NODE}"
        )
    nodes, left = divmod(options.gpus, per_node)
    if left:
        raise ConfigError(
            f"--gpus {options.gpus}: expected a multiple of the {per_node} GPUs of a node"
        )
    if nodes > _MOST_NODES:
        raise ConfigError(
            f"--gpus {options.gpus}: with {per_node} per node (--gpus_per_node) they make {nodes} "
            f"nodes, expected 1 to {_MOST_NODES}"
        )
    return nodes, per_node


def predict_from(options: Options, progress: Callable[[float], None] | None = None) -> Prediction:
    """Return what the options ask for.

    Args:
        options: Of the command.
        progress: Called now and then with the share that is done, 0 to 1.

    Raises:
        ConfigError: a mistake in them, or in the cluster's file.
    """
    from dataclasses import replace

    from torchtitan_dmuon.simulator.cluster import find_cluster
    from torchtitan_dmuon.simulator.operator import predict, predict_publish, segments_of

    check(options)
    lengths = parse_lengths(options.lengths)
    cluster = find_cluster(options.cluster)
    nodes, per_node = mesh_of(options, cluster)
    cluster = replace(cluster, gpus_per_node=per_node)
    seed, delay_us = options.seed, options.delay_us
    try:
        if options.op == "publish":
            owners = owners_of(options.owners, nodes, 1)
            owners = [owners[i % len(owners)] for i in range(options.tasks or len(owners))]
            tasks = segments_of(options.bytes, lengths, owners)
            return predict_publish(
                cluster,
                nodes,
                tasks,
                update_ms=options.update_ms,
                seed=seed,
                delay_us=delay_us,
                progress=progress,
            )
        owners = owners_of(options.owners, nodes, per_node)
        segments = segments_of(options.bytes, lengths, owners)
        return predict(
            options.op, cluster, nodes, segments, seed=seed, delay_us=delay_us, progress=progress
        )
    except (ValueError, NativeError) as e:
        raise ConfigError(f"dmuon simulate: {e}") from e


def report(prediction: Prediction) -> str:
    """Return the prediction as text."""
    p = prediction
    publish = p.operation == "publish"
    what = f"{p.segments} tasks of one rail" if publish else f"{p.segments} segments"
    blocks = "1 thread block" if p.blocks == 1 else f"{p.blocks} thread blocks"
    update = f", {p.ms - p.update_ms:.3f} ms after the last update" if p.update_ms else ""
    lines = [
        f"{p.operation}: {_size(p.bytes)} in {what} on {p.gpus} GPUs "
        f"({p.nodes} nodes), {p.cluster}",
        f"predicted: {p.ms:.3f} ms{update}, {p.path} path, {blocks} per GPU",
        f"{'bytes per GPU':<14}{'busiest':>12}{'mean':>12}",
    ]
    for kind, load in p.links.items():
        name = kind.replace("nic", "NIC").replace("nvlink", "NVLink").replace("_", " ")
        lines.append(f"{name:<14}{_size(load.busiest):>12}{_size(load.mean):>12}")
    return "\n".join(lines)


def _size(value: float) -> str:
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while value >= 1024 and power + 1 < len(units):
        value, power = value / 1024, power + 1
    return f"{value:.0f} B" if power == 0 else f"{value:.1f} {units[power]}"


class Progress:
    """Says how far a run is and how long it may still take, once it takes long.

    A terminal has one line that changes; a file gets a line now and then.
    """

    def __init__(self, stream: TextIO) -> None:
        """Count from now on.

        Args:
            stream: Where to say it.
        """
        self._stream = stream
        self._start = time.monotonic()
        self._pause, self._last = (0.5, "") if stream.isatty() else (10.0, "\n")
        self._next = self._start + _QUIET_SECONDS
        self._shown = False

    def __call__(self, share: float) -> None:
        """Say it, if it is time to.

        Args:
            share: What is done of the run, 0 to 1.
        """
        now = time.monotonic()
        if now < self._next or not 0 < share < 1:
            return
        self._next = now + self._pause
        left = (now - self._start) * (1 - share) / share
        text = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min"
        line = f"simulating: {share:.0%}, about {text} left"
        self._stream.write(line + self._last if self._last else f"\r{line}\x1b[K")
        self._stream.flush()
        self._shown = True

    def close(self) -> None:
        """Leave a terminal's line empty, for what comes next."""
        if self._shown and not self._last:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def run(options: Options, job_options: Sequence[str], arguments: Sequence[str]) -> None:
    """Simulate and print.

    Raises:
        ConfigError: what is wrong, in one line.
    """
    if job_options:
        raise ConfigError(f"{job_options[0]}: dmuon simulate takes no job (see --help)")
    progress = Progress(sys.stderr)
    try:
        prediction = predict_from(options, progress)
    finally:
        progress.close()
    print(prediction.to_json() if options.json else report(prediction))
