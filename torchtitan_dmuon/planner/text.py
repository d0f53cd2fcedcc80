"""A plan as text for a terminal, and in one line for a job's log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from torchtitan_dmuon.planner.plan import Plan

_RAILS = 16
"""Rails that are listed one by one; beyond that only the heaviest is."""


def one_line(plan: Plan) -> str:
    """Return the plan in a line: balance, memory, traffic."""
    memory, cluster = plan.memory_gib, plan.cluster
    verdict = "fits" if plan.fits else "does NOT fit"
    owners = ""
    if plan.owners:
        ns = plan.ns_time
        table = ns.source.partition(",")[0]
        owners = (
            f"{plan.matrices} matrices in {plan.units} units on {plan.owners} owners, busiest "
            f"{ns.busiest_over_mean:.2f} of the mean ({_time(ns.busiest_seconds)} a "
            f"step, by the times of {table}); "
        )
    return (
        f"{owners}about {memory.peak:.1f} of {cluster.memory_gib:.1f} GiB per {_what(plan)} "
        f"({verdict}), {_size(plan.traffic.inside)} sent a step inside a node, "
        f"{_size(plan.traffic.across)} across"
    )


def report(plan: Plan) -> str:
    """Return the plan for a terminal, ASCII, at most 100 columns where names allow."""
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    c, m = plan.cluster, plan.model
    yield (
        f"{m.name} {m.flavor}, {plan.sharding}, mode {plan.mode}"
        f"{f' (line {plan.line})' if plan.line else ''}, on {c.nodes} x {c.gpus_per_node} "
        f"{c.device_name} (mesh {c.rows} x {c.columns})"
    )
    yield (
        f"{_count(m.parameters)} parameters in {plan.groups} groups; {plan.tokens_per_gpu:,} "
        f"tokens per GPU and micro-batch (sequences of {plan.seq_len:,}); recomputation: "
        f"{plan.recompute}"
    )
    yield ""
    yield from _owners(plan)
    yield from _memory(plan)
    yield ""
    yield from _traffic(plan)
    yield ""
    left = abs(plan.headroom_gib)
    verdict = f"fits: {left:.1f} GiB" if plan.fits else f"does NOT fit: {left:.1f} GiB too much"
    yield f"{verdict}{' left' if plan.fits else ''} of {c.memory_gib:.1f} GiB"
    yield from (f"  {line}" for line in plan.advice)
    yield ""
    yield "rests on:"
    yield from (f"  - {line}" for line in plan.assumptions)


def _owners(plan: Plan) -> Iterator[str]:
    ns = plan.ns_time
    if not plan.owners:
        if ns.busiest_seconds:
            yield f"updates   {_time(ns.busiest_seconds)} a step on every GPU ({plan.algorithm})"
            yield ""
        return
    extra = f", at best {_time(ns.bound_seconds)}"
    yield (
        f"owners    {plan.matrices} matrices in {plan.units} units (up to {plan.units_per_layer} "
        f"a layer) on {plan.owners} GPUs, by {plan.assignment}"
    )
    yield (
        f"time      busiest {_time(ns.busiest_seconds)} a step, {ns.busiest_over_mean:.2f} of the "
        f"mean{extra} ({plan.algorithm})"
    )
    cap = "no cap" if plan.bytes.cap is None else f"cap {1 + plan.bytes.cap:.2f}"
    over = f", {plan.bytes.over_cap} units over it" if plan.bytes.over_cap else ""
    yield f"bytes     heaviest {plan.bytes.heaviest_over_mean:.2f} of the mean ({cap}{over})"
    yield (
        f"layers    worst {plan.worst_layer}: its heaviest owner holds "
        f"{plan.worst_layer_root_ratio:.2f} of the largest unit"
    )
    for name, ratio in (
        ("state", plan.state_bytes),
        ("masters", plan.master_bytes),
        ("window", plan.owner_window_bytes),
        ("copies", plan.leader_copy_bytes),
        ("gradients", plan.gradient_bytes),
    ):
        yield f"{name:<9} {_size(ratio.busiest)} at most on a GPU, {_size(ratio.mean)} on average"
    if plan.pool_bytes:
        yield f"pool      {_size(plan.pool_bytes)} on every GPU"
    yield from _rails(plan)
    yield ""


def _rails(plan: Plan) -> Iterator[str]:
    if not plan.rails:
        return
    yield (
        f"rails     heaviest {plan.columns.publish_max_over_mean:.3f} of the mean in bytes, "
        f"{plan.columns.time_max_over_mean:.3f} in time"
    )
    heaviest = max(plan.rails, key=lambda rail: rail.bytes)
    for rail in plan.rails if len(plan.rails) <= _RAILS else [heaviest]:
        yield (
            f"  rail {rail.column:<3} {rail.tasks:>5} tasks ({rail.matrices} matrices), "
            f"{_size(rail.bytes):>10}, largest {_size(rail.largest_bytes):>9}, "
            f"{_time(rail.seconds)} of updates"
        )


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.memory_gib
    names = [f.name for f in fields(memory) if f.name != "peak"]
    widest = max(getattr(memory, name) for name in names) or 1.0
    yield f"memory    {memory.peak:.2f} GiB at the peak of the heaviest GPU"
    for name in names:
        value = getattr(memory, name)
        bar = "#" * round(40 * value / widest)
        yield f"  {name.replace('_', ' '):<14} {value:>7.2f}  {bar}".rstrip()


def _traffic(plan: Plan) -> Iterator[str]:
    t = plan.traffic
    yield (
        f"traffic   {_size(t.inside)} inside the node and {_size(t.across)} across nodes, sent per "
        "GPU and step"
    )
    for name, inside, across in (
        ("gather", t.gather_inside, t.gather_across),
        ("reduce", t.reduce_inside, t.reduce_across),
        ("publish", t.publish_inside, t.publish_across),
        ("outside layers", t.rest_inside, t.rest_across),
        ("optimizer", t.optimizer_inside, t.optimizer_across),
    ):
        if inside or across:
            yield f"  {name:<14} {_size(inside):>10} inside, {_size(across):>10} across"


def _what(plan: Plan) -> str:
    return "rank" if plan.cluster.device == "cpu" else "GPU"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e8 else f"{number / 1e6:.2f}M"


def _size(bytes_: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if bytes_ >= size:
            return f"{bytes_ / size:.2f} {unit}"
    return f"{bytes_:.0f} B"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
