"""What a cluster costs: descriptions that ship with the package, and a user's own."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torchtitan_dmuon.config.errors import ConfigError, nearest
from torchtitan_dmuon.config.toml_io import merge, read

FOLDER = Path(__file__).resolve().parent / "clusters"

_MOST = 1e6  # microseconds or GB/s


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the operations of one thread group cost, and what the links carry.

    Times (`_us`) are microseconds, at least 0. Rates (`_gbs`) are 1e9 bytes per second, above 0. A
    thread group is one block of 256 threads.

    Attributes:
        launch_us: A call costs this whatever it does: until its groups run, and until its end is
            seen.
        read_us: A group reads one flag, signal or counter in its own GPU's memory, and all its
            threads know it.
        flag_us: A flag written to the GPUs of the node, until they see it.
        fence_us: A group waits until all it wrote in the node is there.
        load_us: First bytes of a copy from a peer's memory.
        store_us: First bytes of a multicast.
        reduce_us: First bytes of a reduction in the switch.
        copy_gbs: One group copies from a peer.
        multicast_gbs: One group multicasts.
        group_reduce_gbs: One group reduces.
        port_gbs: NVLink of one GPU, each direction: copies and multicasts. What is left of the
            nominal rate for payload.
        port_reduce_gbs: The same for reductions.
        put_us: A group orders its writes and issues a put.
        signal_us: A group issues a signal.
        nic_gbs: One NIC, each direction.
        message_gbs: The bytes of one message pass at this rate through both NICs and PCIe, however
            idle they are.
        message_us: A NIC between two messages.
        wire_us: Between the first byte's leaving and its being in the remote GPU's memory.
        arrive_us: Between a message's last byte and its signal being in that memory.
    """

    launch_us: float
    read_us: float
    flag_us: float
    fence_us: float
    load_us: float
    store_us: float
    reduce_us: float
    copy_gbs: float
    multicast_gbs: float
    group_reduce_gbs: float
    port_gbs: float
    port_reduce_gbs: float
    put_us: float
    signal_us: float
    nic_gbs: float
    message_gbs: float
    message_us: float
    wire_us: float
    arrive_us: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            lowest = 0.0 if field.name.endswith("_us") else 1e-3
            if not (math.isfinite(value) and lowest <= value <= _MOST):
                raise ValueError(f"{field.name}: expected {lowest:g} to {_MOST:g}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A kind of cluster, of any number of nodes.

    Attributes:
        name: For reports.
        gpus_per_node: GPUs of a node, each with its own NIC.
        costs: What its operations cost.
    """

    name: str
    gpus_per_node: int
    costs: Costs

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1:
            raise ValueError(f"gpus_per_node: expected at least 1, got {self.gpus_per_node}")


def names() -> list[str]:
    """Return the clusters that the package describes."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def shipped(name: str) -> Cluster:
    """Return one of `names()`."""
    table: dict[str, Any] = read(FOLDER / f"{name}.toml", name)[0]
    return Cluster(**table | {"costs": Costs(**table["costs"])})


def find_cluster(name: str, default: str = "h100_400g") -> Cluster:
    """Return a cluster's description.

    Args:
        name: One of `names()`, or the path of a TOML file; what such a file leaves out is as in
            `default`.

    Raises:
        ConfigError: no such name or file, or a mistake in the file.
    """
    if name in names():
        return shipped(name)
    if not name.endswith(".toml"):
        raise ConfigError(
            f'--cluster: "{name}" is neither one of {", ".join(names())} nor a .toml file'
            f"{nearest(name, names())}"
        )
    table, source = read(Path(name), name)
    return merge(shipped(default), table, source)
