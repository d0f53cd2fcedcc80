"""The publish under the `sim` fabric of csrc/: one rail, and the training loop around it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchtitan_dmuon.native.segments import Segment, to_c
from torchtitan_dmuon.simulator.binding import CCosts, Outcome, Told, library
from torchtitan_dmuon.simulator.cluster import Costs
from torchtitan_dmuon.simulator.watch import Watch, watched


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishRun:
    """What is simulated.

    Attributes:
        nodes: Of the rail.
        buffer_bytes: Of what the tasks lie in.
        steps: One after the other, under the step rule of csrc/core/publish.h.
        tile_bytes: Bytes of a tile, a multiple of 16; 0: the protocol's own.
        slots: Tiles of a source that are on their way; 0: the protocol's own.
        carry: Move and check bytes.
        unordered: Break the fabric: a release does not order what was written before it.
        seed: Of all that is random.
        delay_us: Operations are delayed at random up to this, now and then 16 times longer.
    """

    nodes: int
    buffer_bytes: int
    steps: int = 1
    tile_bytes: int = 0
    slots: int = 0
    carry: bool = False
    unordered: bool = False
    seed: int = 0
    delay_us: float = 0.0


class _Config(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("nodes", "slots", "steps", "carry", "unordered")),
        ("tile_bytes", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("buffer_bytes", "seed")),
        ("delay_us", ctypes.c_double),
        ("costs", CCosts),
    ]


def simulate_publish(
    run: PublishRun,
    costs: Costs,
    tasks: Sequence[Segment],
    ready_us: Sequence[float] | None = None,
    *,
    schedules: int = 1,
    protocol: ctypes.CDLL | None = None,
    progress: Callable[[float], None] | None = None,
) -> Outcome:
    """Publish the tasks step by step; nodes are the ranks of one rail.

    Args:
        run: What is simulated.
        costs: What operations cost.
        tasks: `node` is the source; those of one node in the order of its updates; `rail` is 0.
        ready_us: Per task when its update is done, in microseconds from its step's beginning.
            None: all at once, before the call is launched.
        schedules: Runs, with the seeds run.seed, run.seed + 1, ...; the outcome is the last one's.
        protocol: A library made of `binding.PUBLISH_SOURCES`, in place of this package's.
        progress: Called now and then with the share of a schedule that is done, 0 to 1.

    Raises:
        ValueError: a table or a size is wrong; the message names the task.
        Violation: a deadlock or, with `run.carry`, wrong bytes, an old version, or a race.
        NativeError: the simulator cannot be compiled.
        KeyboardInterrupt: after Ctrl-C; the run has ended.
    """
    values = {name: getattr(run, name) for name, _ in _Config._fields_ if name != "costs"}  # type: ignore[misc]
    config = _Config(**values, costs=CCosts.of(costs))
    table = to_c(tasks, "task")
    ready = (ctypes.c_double * len(tasks))(*([0.0] * len(tasks) if ready_us is None else ready_us))
    told = Told(run.nodes)
    actor = protocol.dmuon_sim_make_publish_actor if protocol else None
    functions = library()

    def work(watch: Watch) -> Outcome:
        code = functions.dmuon_sim_publish(
            ctypes.byref(config),
            table,
            ready,
            len(tasks),
            schedules,
            *told.arguments,
            ctypes.cast(actor, ctypes.c_void_p) if actor else None,
            ctypes.byref(watch),
        )
        return told.outcome(code)

    return watched(work, progress)
