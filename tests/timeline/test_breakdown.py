"""Every moment of a step is counted once, where the paper's figure 10 counts it."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.timeline.synthetic import (
    MAIN,
    backward,
    kernel,
    moves,
    optimizer,
    span,
    step,
    waits,
    write,
)
from torchtitan_dmuon.timeline.breakdown import break_down
from torchtitan_dmuon.timeline.intervals import intersect, length, subtract, union
from torchtitan_dmuon.timeline.trace import read_trace

Event = dict[str, Any]


@pytest.fixture
def figures(tmp_path: Path) -> Any:
    """Return a function from events to the figures of a step, times in microseconds."""

    def of(events: list[Event], number: int = 3) -> dict[str, Any]:
        found = break_down(read_trace(write(tmp_path / "trace.json", events)), number).as_dict()

        def scaled(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: scaled(x) for key, x in value.items()}
            return round(value * 1e3, 3) if isinstance(value, float) else value

        result: dict[str, Any] = scaled(found)
        parts = ("forward_ms", "backward_ms", "optimizer_ms", "exposed_ms", "publish_wait_ms")
        total = sum(result[key] for key in (*parts, "idle_ms"))
        assert total == pytest.approx(result["step_ms"], abs=0.01)
        return result

    return of


PLAIN = [
    step(3, 0, 1000),
    span("aten::linear", 100, 200),
    span("aten::mm", 120, 180),  # inside
    span("aten::gelu", 205, 400),
    backward(420, 600),
    span("dmuon end of backward", 601, 610),
    span("aten::linalg_vector_norm", 620, 640),  # clipping
    optimizer(650, 800),
    span("aten::item", 900, 910),  # logging
]


def test_phases(figures: Any) -> None:
    """Operators belong to phases by where they stand; what lies between phases is idle."""
    found = figures(PLAIN)
    assert found["forward_ms"] == 300  # with the interpreter's 5 between two operators
    assert found["backward_ms"] == 190
    assert found["optimizer_ms"] == 180  # from the clipping on
    assert found["exposed_ms"] == found["publish_wait_ms"] == 0
    assert found["idle_ms"] == 330
    assert found["step_ms"] == 1000


def test_waits_are_exposed_and_the_rest_is_hidden(figures: Any) -> None:
    """Communication counts against the step only while the training thread waits for it."""
    found = figures(
        [
            *PLAIN,
            moves("gather", 110, 290, 7),
            waits("gather", 205, 300),
            moves("reduce_scatter_v", 430, 700, 8),
            waits("reduce", 500, 550),  # inside of backward
            span("dmuon exchange of scalars (rank 0 among ranks 0, 1)", 660, 665),
        ]
    )
    assert found["exposed"] == {"reduce": 50, "gather": 95, "publish": 0, "other": 5}
    assert found["forward_ms"] == 300 - 95
    assert found["backward_ms"] == 190 - 50
    assert found["optimizer_ms"] == 180 - 5
    assert found["communication"] == {"reduce": 270, "gather": 180, "publish": 0, "other": 0}
    # 110..205 of the gather; 430..610 less the wait, and 620..700 less the exchange.
    assert found["hidden"] == {"reduce": 205, "gather": 95, "publish": 0, "other": 0}


@pytest.mark.parametrize("name", ["wait for dmuon publish of", "wait for publish of"])
def test_publish_wait_is_what_the_forward_waits_for_a_publish(figures: Any, name: str) -> None:
    """A gather that waits for the last publish is no slow gather; waiting inside the update is
    exposed publishing."""
    found = figures(
        [
            *PLAIN,
            waits("gather", 205, 300),
            span(f"{name} layers.0:w (rank 0 among ranks 0, 2)", 50, 250, 7),
            span(f"{name} layers.1:w (rank 0 among ranks 0, 2)", 700, 730),
        ]
    )
    assert found["publish_wait_ms"] == 45
    assert found["exposed"] == {"reduce": 0, "gather": 50, "publish": 30, "other": 0}


def test_publish_wait_of_resident_weights(figures: Any) -> None:
    """Without a gather (ZeRO-2) the forward waits for the publish itself."""
    found = figures([*PLAIN, waits("publish", 210, 240), waits("publish", 950, 980)])
    assert found["publish_wait_ms"] == 60
    assert found["exposed_ms"] == 0
    assert found["idle_ms"] == 330 - 30


def test_micro_batches(figures: Any) -> None:
    """The second forward of a step stands between two backwards, and is a forward."""
    found = figures(
        [
            step(3, 0, 500),
            span("aten::linear", 0, 100),
            backward(100, 200),
            span("aten::linear", 200, 300),
            backward(300, 400),
            optimizer(400, 500),
        ]
    )
    assert (found["forward_ms"], found["backward_ms"], found["optimizer_ms"]) == (200, 200, 100)
    assert found["idle_ms"] == 0


def test_waiting_for_data_is_idle(figures: Any) -> None:
    """A slow loader must not look like a slow model."""
    found = figures(
        [
            step(3, 0, 500),
            span("aten::to", 0, 10),
            span("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 20, 200),
            span("aten::stack", 50, 60),
            span("aten::linear", 210, 300),
            backward(300, 500),
        ]
    )
    assert (found["forward_ms"], found["idle_ms"]) == (100, 200)


def test_ranges_of_fsdp_on_a_cpu(figures: Any) -> None:
    """Line A: on CPUs FSDP2 waits inside its own ranges."""
    found = figures(
        [
            step(3, 0, 500),
            span("FSDP::pre_forward (layers.0)", 10, 60),
            span("FSDP::all_gather (layers.0)", 15, 50),
            span("gloo:all_gather", 20, 45, 9),
            span("aten::linear", 60, 200),
            backward(200, 400),
            span("FSDP::post_backward_reduce (layers.0)", 300, 340),
            span("FSDP::post_backward_reshard (layers.0)", 350, 360),  # frees memory
            span("FSDP::root_post_backward_callback", 400, 420),
            optimizer(420, 500),
        ]
    )
    assert found["exposed"] == {"reduce": 60, "gather": 50, "publish": 0, "other": 0}
    assert (found["forward_ms"], found["backward_ms"]) == (140, 160)
    assert found["communication"]["gather"] == 25


def test_a_range_that_never_ended(figures: Any) -> None:
    """A wait that was going on when recording stopped lasts to the end, not no time at all."""
    events = [step(3, 0, 1000), span("aten::linear", 0, 100), waits("gather", 100, None)]
    assert figures([*events, span("aten::add", 1200, 1300)])["exposed"]["gather"] == 900


def test_only_the_chosen_step_counts(figures: Any) -> None:
    """What crosses the boundary of a step counts in both, each its part."""
    events = [
        step(3, 0, 100),
        step(4, 100, 300),
        step(5, 300, 301),  # the job ended in it
        optimizer(0, 100),
        span("aten::linear", 100, 200),
        backward(200, 300),
        moves("publish", 50, 150, 9),
    ]
    assert figures(events, 3)["hidden"]["publish"] == 50
    assert figures(events, 4)["hidden"]["publish"] == 50
    assert figures(events, 4)["backward_ms"] == 100
    with pytest.raises(KeyError):
        figures(events, 5)


def test_random_traces_add_up(figures: Any) -> None:
    """Whatever overlaps, figures are not negative and sum to the step (the fixture checks)."""
    random_ = random.Random(0)
    for _ in range(20):
        events = [step(3, 100, 1100)]
        for _ in range(60):
            start = random_.uniform(0, 1200)
            end = start + random_.expovariate(1 / 60)
            kind = random_.choice(["gather", "reduce", "publish"])
            make = random_.choice(
                [
                    lambda a, b: span("aten::mm", a, b),
                    backward,
                    optimizer,
                    lambda a, b, k=kind: waits(k, a, b),
                    lambda a, b, k=kind: moves(k, a, b, 7),
                    lambda a, b, k=kind: waits(k, a, b, 7),
                ]
            )
            events.append(make(start, end))
        found = figures(events)
        values = [v for v in found.values() if isinstance(v, float)]
        values += [v for key in ("exposed", "hidden") for v in found[key].values()]
        assert min(values) >= 0
        for kind, hidden in found["hidden"].items():
            assert hidden <= found["communication"][kind] + 0.01


# Of a step on a GPU: main thread 100, autograd's thread 101, streams 7 (computes), 20, 21, 22.
GPU = [
    step(3, 0, 400),
    span("aten::linear", 10, 100),
    backward(110, 200, 101),
    optimizer(210, 300),
    *kernel("sgemm_forward", 1000, 1100, 7, 50),
    *kernel("sgemm_forward", 1200, 1300, 7, 60),
    *kernel("sgemm_backward", 1300, 1500, 7, 150),
    *kernel("gram_newton_schulz", 1600, 1700, 7, 250),
]


def test_kernels_belong_to_the_phase_that_launched_them(figures: Any) -> None:
    """On GPUs the host runs ahead: a kernel counts where its launch stands, idle is no kernel."""
    found = figures(GPU)
    assert found["device"] == "cuda"
    assert found["step_ms"] == 700
    assert (found["forward_ms"], found["backward_ms"], found["optimizer_ms"]) == (200, 200, 100)
    assert found["idle_ms"] == 200


def test_a_step_on_a_gpu_is_as_long_as_the_profiler_says(figures: Any) -> None:
    """The range of the step on the streams counts, not only its kernels."""
    mark = {**span("ProfilerStep#3", 900, 1800, 7), "cat": "gpu_user_annotation"}
    found = figures([*GPU, mark])
    assert (found["step_ms"], found["idle_ms"]) == (900, 400)


def test_communication_kernels(figures: Any) -> None:
    """Our ranges say what an NCCL kernel is for; without them its name does. Exposed is what no
    other kernel runs beside, and a publish that the forward waits for is publish wait."""
    labels = [
        span(f"dmuon publish of layers.{i} (rank 0 among ranks 0, 8)", start, end, 22)
        for i, start, end in ((0, 1090, 1180), (1, 1560, 1600))
    ]
    found = figures(
        [
            *GPU,
            *({**label, "cat": "gpu_user_annotation", "pid": 0} for label in labels),
            *kernel("ncclDevKernel_Broadcast_RING_LL(...)", 1095, 1170, 22),
            *kernel("ncclDevKernel_Broadcast_RING_LL(...)", 1570, 1590, 22),
            *kernel("all_gather_v_kernel", 1155, 1205, 20),
            *kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(...)", 1450, 1540, 21),
            *kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)", 1550, 1560, 21),
        ]
    )
    assert found["publish_wait_ms"] == 55
    assert found["exposed"] == {"reduce": 40, "gather": 45, "publish": 20, "other": 10}
    assert found["idle_ms"] == 200 - 55 - 45 - 40 - 20 - 10
    assert found["hidden"] == {"reduce": 50, "gather": 5, "publish": 5, "other": 0}


def test_sets_of_times() -> None:
    """The set operations agree with counting every unit of time."""
    random_ = random.Random(1)

    def make() -> list[tuple[float, float]]:
        starts = [random_.randrange(40) for _ in range(random_.randrange(6))]
        return [(float(s), float(s + random_.randrange(8))) for s in starts]

    def units(pairs: list[tuple[float, float]]) -> set[int]:
        return {t for start, end in pairs for t in range(int(start), int(end))}

    for _ in range(300):
        a, b = union(make()), union(make())
        assert units(intersect(a, b)) == units(a) & units(b)
        assert units(subtract(a, b)) == units(a) - units(b)
        assert length(subtract(a, b)) == len(units(a) - units(b))
        assert all(x[1] < y[0] for x, y in pairwise(a))


def test_threads_that_only_wait_do_not_compute(figures: Any) -> None:
    """Operators of communication threads are no computation of the step."""
    found = figures([*PLAIN, span("aten::copy_", 0, 1000, MAIN + 1)])
    assert found["idle_ms"] == 330
