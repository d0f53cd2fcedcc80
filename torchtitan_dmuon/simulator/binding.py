"""The `sim` fabric of csrc/ from Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from torchtitan_dmuon.native.build import build
from torchtitan_dmuon.native.segments import Segment, to_c
from torchtitan_dmuon.simulator.cluster import Costs
from torchtitan_dmuon.simulator.watch import Watch, watched

SOURCES = (
    "api/sim_api.cpp",
    "fabric/sim.cpp",
    "fabric/sim_group.cpp",
    "fabric/sim_memory.cpp",
    "fabric/sim_publish.cpp",
    "fabric/sim_publish_group.cpp",
    "core/publish_table.cpp",
    "core/table.cpp",
)
PROTOCOL_SOURCES = ("fabric/sim_group.cpp",)
"""What depends on the steps of the protocol."""
PUBLISH_SOURCES = ("fabric/sim_publish_group.cpp",)
"""What depends on the steps of the publish."""

OPERATIONS = {"allgatherv": 0, "reducescatterv": 1}
DTYPES = {"bfloat16": 0, "float32": 1}
RELEASES = ("", "put", "signal", "finish", "enter")


class Violation(RuntimeError):
    """A run came to a standstill, or moved wrong bytes; says where, and with which seed."""


@dataclass(frozen=True, slots=True)
class Links:
    """Bytes that the links of one GPU carried.

    Attributes:
        nic_out: Sent by its NIC.
        nic_in: Received by its NIC.
        nvlink_out: Left the GPU over NVLink.
        nvlink_in: Came in over NVLink.
    """

    nic_out: int
    nic_in: int
    nvlink_out: int
    nvlink_in: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run showed.

    Attributes:
        ms: From the launch of the first call until the slowest rank left the last one.
        steps: Steps of all thread groups, in all schedules.
        groups: Thread groups of a rank in the last call.
        star: Whether the last call took the star path.
        links: Per rank, node by node.
        rank_ms: Per rank: when it left its last call.
    """

    ms: float
    steps: int
    groups: int
    star: bool
    links: list[Links]
    rank_ms: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is simulated: a mesh, a channel, and how.

    Attributes:
        operation: "allgatherv" or "reducescatterv".
        nodes: Nodes.
        rails: GPUs of a node.
        buffer_bytes: Of the group's buffer.
        home_bytes: Of an owner's reduced buffer.
        chunk_bytes: Bytes of a chunk, a multiple of 16; 0: the protocol's own.
        slots: Slots of a ring; 0: the protocol's own.
        dtype: Of the elements: "bfloat16" or "float32".
        groups: Thread groups of a call; 0: as many as the plan wants.
        lanes: Pipelines of a queue; 0: as many as the channel has.
        carry: Move and check bytes.
        without_release: Break the fabric: the operation ("put", "signal", "finish", "enter") does
            not order what was written before it. Empty: a right fabric.
        seed: Of all that is random.
        delay_us: Operations are delayed at random up to this, now and then 16 times longer.
    """

    operation: str
    nodes: int
    rails: int
    buffer_bytes: int
    home_bytes: int = 0
    chunk_bytes: int = 0
    slots: int = 0
    dtype: str = "bfloat16"
    groups: int = 0
    lanes: int = 0
    carry: bool = False
    without_release: str = ""
    seed: int = 0
    delay_us: float = 0.0


class CCosts(ctypes.Structure):
    """`dmuon::sim::Costs` of csrc/fabric/sim.h."""

    _fields_ = [(f.name, ctypes.c_double) for f in fields(Costs)]

    @classmethod
    def of(cls, costs: Costs) -> CCosts:
        """Return the costs, as C takes them."""
        return cls(*(getattr(costs, f.name) for f in fields(Costs)))


class _Config(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("operation", "nodes", "rails", "slots", "dtype")),
        *((name, ctypes.c_int32) for name in ("groups", "lanes", "carry", "dropped")),
        ("chunk_bytes", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("buffer_bytes", "home_bytes", "seed")),
        ("delay_us", ctypes.c_double),
        ("costs", CCosts),
    ]


class _Summary(ctypes.Structure):
    _fields_ = [
        ("us", ctypes.c_double),
        ("steps", ctypes.c_uint64),
        ("groups", ctypes.c_int32),
        ("star", ctypes.c_int32),
    ]


class Told:
    """What a run of so many ranks tells; `arguments` are where C writes it."""

    def __init__(self, ranks: int) -> None:
        self._summary = _Summary()
        self._links = (ctypes.c_uint64 * (4 * ranks))()
        self._rank_us = (ctypes.c_double * ranks)()
        self.arguments = (ctypes.byref(self._summary), self._links, self._rank_us)

    def outcome(self, code: int) -> Outcome:
        """Return what the run showed; `code` is what the C function returned to this thread.

        Raises:
            ValueError, Violation: what it means, with its text.
        """
        if code:
            text = library().dmuon_error().decode()
            raise Violation(text) if code == -2 else ValueError(text)
        summary, values = self._summary, list(self._links)
        return Outcome(
            ms=summary.us / 1e3,
            steps=summary.steps,
            groups=summary.groups,
            star=bool(summary.star),
            links=[Links(*values[i : i + 4]) for i in range(0, len(values), 4)],
            rank_ms=[x / 1e3 for x in self._rank_us],
        )


@cache
def library() -> ctypes.CDLL:
    """Return the compiled simulator."""
    functions = ctypes.CDLL(str(build("dmuon_sim", SOURCES, flags=("-O2",))))
    functions.dmuon_error.restype = ctypes.c_char_p
    told_actor_watch = [ctypes.c_void_p] * 5
    functions.dmuon_sim_run.argtypes = [
        ctypes.POINTER(_Config),
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint64,
        ctypes.c_uint64,
        *told_actor_watch,
    ]
    functions.dmuon_sim_publish.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint64,
        ctypes.c_uint64,
        *told_actor_watch,
    ]
    return functions


def simulate(
    run: Run,
    costs: Costs,
    calls: Sequence[Sequence[Segment]],
    *,
    schedules: int = 1,
    protocol: ctypes.CDLL | None = None,
    progress: Callable[[float], None] | None = None,
) -> Outcome:
    """Make the calls one after the other on every rank, in one channel.

    Args:
        run: What is simulated.
        costs: What operations cost.
        calls: The tables of segments.
        schedules: Runs, with the seeds run.seed, run.seed + 1, ...; the outcome is the last one's.
        protocol: A library made of `PROTOCOL_SOURCES`, in place of this package's: it drives the
            calls.
        progress: Called now and then with the share of a schedule that is done, 0 to 1.

    Raises:
        ValueError: a table or a size is wrong; the message names the segment.
        Violation: a deadlock or, with `run.carry`, wrong bytes or a race.
        NativeError: the simulator cannot be compiled.
        KeyboardInterrupt: after Ctrl-C; the run has ended.
    """
    flat = [s for call in calls for s in call]
    segments = to_c(flat)
    counts = (ctypes.c_uint64 * len(calls))(*(len(call) for call in calls))
    told = Told(run.nodes * run.rails)
    config = _config(run, costs)
    actor = protocol.dmuon_sim_make_actor if protocol else None
    functions = library()

    def work(watch: Watch) -> Outcome:
        code = functions.dmuon_sim_run(
            ctypes.byref(config),
            segments,
            counts,
            len(calls),
            schedules,
            *told.arguments,
            ctypes.cast(actor, ctypes.c_void_p) if actor else None,
            ctypes.byref(watch),
        )
        return told.outcome(code)

    return watched(work, progress)


def _config(run: Run, costs: Costs) -> _Config:
    values: dict[str, Any] = {
        name: getattr(run, name)
        for name in (field[0] for field in _Config._fields_)
        if name not in ("operation", "dtype", "dropped", "costs")
    }
    return _Config(
        **values,
        operation=OPERATIONS[run.operation],
        dtype=DTYPES[run.dtype],
        dropped=RELEASES.index(run.without_release),
        costs=CCosts.of(costs),
    )
