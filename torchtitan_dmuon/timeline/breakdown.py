"""Splits the time of a step into forward, backward, optimizer, exposed communication, publish
wait and idle, as the paper's figure 10 does (its section D.4).

On CPUs the thread that trains is looked at: what it runs belongs to a phase, and where it waits,
communication is exposed. On GPUs the streams are: a kernel belongs to the phase that launched it,
and communication is exposed where no other kernel runs.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchtitan_dmuon.timeline.intervals import Intervals, intersect, length, subtract, union
from torchtitan_dmuon.timeline.trace import Kernel, Span, Trace

PHASES = ("forward", "backward", "optimizer")
KINDS = ("reduce", "gather", "publish", "other")
"""Of communication. Where several are exposed at once, the first of them counts."""

_OURS = re.compile(r"(wait for )?(?:dmuon (\w+)|(publish)) of ")
_OPERATION = {
    "gather": "gather",
    "all_gather_v": "gather",
    "reduce": "reduce",
    "reduce_rows": "reduce",
    "reduce_scatter_v": "reduce",
    "publish": "publish",
    "exchange": "other",
    "collect": "other",
}
_WAITED = ("exchange", "collect")
"""Of these the caller waits: no thread or stream runs them beside it."""

_BACKWARD = ("autograd::engine::evaluate_function", "dmuon end of backward")
_OPTIMIZER = ("Optimizer.step#", "dmuon agree on gradients")
_INPUT = "enumerate(DataLoader)"

# Names of others: FSDP2's ranges (on CPUs it waits inside them), torch.distributed's, NCCL's.
_FSDP = re.compile(
    r"FSDP::(?:root_post_backward|post_backward_r(?:educe|s_wait)|"
    r"(all_gather|pre_forward|pre_backward))"
)
_BACKEND = re.compile(r"gloo:_?(?:(all_?gather)|(reduce_scatter)|all_?reduce)")
_ROUNDING = 0.01
_WAITING_OPS = ("_c10d_functional::wait_tensor", "c10d::barrier", "gloo:barrier")
_NCCL = re.compile(r"nccl\w*?_?(AllGather|ReduceScatter|Reduce|Broadcast|SendRecv|AllReduce)")
_NCCL_KIND = {"AllGather": "gather", "ReduceScatter": "reduce", "Reduce": "reduce"}


class Bar(NamedTuple):
    """One piece of communication, for pictures; microseconds."""

    start: float
    end: float
    kind: str
    label: str


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where the time of one step of one rank went.

    Attributes:
        rank: Rank.
        step: Number of the step, as the trace has it.
        device: "cpu" or "cuda".
        start: Of the step, microseconds of the trace's clock.
        end: Of the step.
        phases: Times of forward, backward and optimizer, without waits.
        exposed: Times of exposed communication by kind.
        publish_wait: Times in which the next forward waits for the last publish.
        idle: What is left.
        communication: Times in which communication was under way, by kind.
        bars: The pieces of communication.
    """

    rank: int
    step: int
    device: str
    start: float
    end: float
    phases: dict[str, Intervals]
    exposed: dict[str, Intervals]
    publish_wait: Intervals
    idle: Intervals
    communication: dict[str, Intervals]
    bars: tuple[Bar, ...]

    def hidden(self, kind: str) -> Intervals:
        """Return the times in which communication of a kind ran beside computation."""
        busy = union(pair for times in self.phases.values() for pair in times)
        return intersect(self.communication[kind], busy)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures, in milliseconds; docs/timeline.md explains the keys."""

        def ms(times: Intervals) -> float:
            return round(length(times) / 1e3, 6)

        exposed = {kind: ms(self.exposed[kind]) for kind in KINDS}
        return {
            "rank": self.rank,
            "step": self.step,
            "device": self.device,
            "step_ms": round((self.end - self.start) / 1e3, 6),
            **{f"{name}_ms": ms(self.phases[name]) for name in PHASES},
            "exposed_ms": round(sum(exposed.values()), 6),
            "exposed": exposed,
            "publish_wait_ms": ms(self.publish_wait),
            "idle_ms": ms(self.idle),
            "communication": {kind: ms(self.communication[kind]) for kind in KINDS},
            "hidden": {kind: ms(self.hidden(kind)) for kind in KINDS},
        }


def break_down(trace: Trace, step: int) -> Breakdown:
    """Return where the time of a step of a trace went."""
    span = trace.steps[step]
    if trace.kernels:
        return _on_device(trace, step)
    window = (span.start, span.end)
    host = [s for s in _within(trace.host, window) if s is not span]
    compute = _compute_threads(trace, host)
    phases = _phases([s for s in host if s.thread in compute], window)
    waits, bars = _host_communication(host, compute, window)
    awaited = union((s.start, s.end) for s in host if _kind(s.name) == ("publish", True))
    # The forward waits for a publish itself, or for a gather that does.
    late = union([*waits["publish"], *intersect(waits["gather"], awaited)])
    publish_wait = subtract(late, union([*phases["backward"], *phases["optimizer"]]))
    return _settle(trace.rank, step, "cpu", window, phases, waits, publish_wait, bars)


def _settle(
    rank: int,
    step: int,
    device: str,
    window: tuple[float, float],
    busy: dict[str, Intervals],
    waits: dict[str, Intervals],
    publish_wait: Intervals,
    bars: Sequence[Bar],
) -> Breakdown:
    """Let every moment of the step count once: publish wait, then waits by kind, then phases."""
    left = [window]
    publish_wait = intersect(publish_wait, left)
    left = subtract(left, publish_wait)
    exposed, phases = {}, {}
    for kind in KINDS:
        exposed[kind] = intersect(waits[kind], left)
        left = subtract(left, exposed[kind])
    for name in PHASES:
        phases[name] = intersect(busy[name], left)
        left = subtract(left, phases[name])
    under_way = {kind: union((b.start, b.end) for b in bars if b.kind == kind) for kind in KINDS}
    return Breakdown(
        rank, step, device, *window, phases, exposed, publish_wait, left, under_way, tuple(bars)
    )


# -- host ------------------------------------------------------------------------------------


def _within(spans: Iterable[Span], window: tuple[float, float]) -> list[Span]:
    return [s for s in spans if s.start < window[1] and s.end > window[0]]


def _compute_threads(trace: Trace, host: Iterable[Span]) -> set[str]:
    """Return the thread that trains, and those of autograd (for GPUs it has its own)."""
    return {trace.main} | {s.thread for s in host if s.name.startswith(_BACKWARD[0])}


def _kind(name: str) -> tuple[str, bool] | None:
    """Return the kind of communication that a range of a host thread is about, and whether the
    thread waits for it; None: neither."""
    ours = _OURS.match(name)
    operation = (ours[2] or ours[3]) if ours else ""
    if ours and operation in _OPERATION:
        return _OPERATION[operation], bool(ours[1]) or operation in _WAITED
    fsdp = _FSDP.match(name)
    if fsdp:
        return ("gather" if fsdp[1] else "reduce"), True
    if name.startswith(_WAITING_OPS):
        return "other", True
    backend = _BACKEND.match(name)
    if backend:
        return ("gather" if backend[1] else "reduce" if backend[2] else "other"), False
    return None


def _host_communication(
    host: Iterable[Span], compute: set[str], window: tuple[float, float]
) -> tuple[dict[str, Intervals], list[Bar]]:
    """Return where the compute threads wait, by kind, and what runs on other threads."""
    waits: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    bars = []
    for span in host:
        found = _kind(span.name)
        if found is None:
            continue
        kind, is_wait = found
        start, end = max(span.start, window[0]), min(span.end, window[1])
        if span.thread in compute:
            if is_wait:
                waits[kind].append((start, end))
        elif not is_wait:
            bars.append(Bar(start, end, kind, span.name))
    return {kind: union(pairs) for kind, pairs in waits.items()}, sorted(bars)


def _phases(spans: Iterable[Span], window: tuple[float, float]) -> dict[str, Intervals]:
    """Return the times of each phase, from the outermost spans of the compute threads.

    The time between two spans of one phase is the phase's: the
    interpreter works. That between two phases, and before and after all, belongs to none.
    """
    outer: list[Span] = []
    end = window[0]
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        # An inner span may end some nanoseconds late: times are rounded.
        if span.end > end + _ROUNDING:
            outer.append(span._replace(start=max(span.start, end)))
            end = span.end
    named = [_phase(s.name) for s in outer]
    following: list[str | None] = [None] * len(outer)
    for i in range(len(outer) - 2, -1, -1):
        following[i] = named[i + 1] if named[i + 1] in PHASES else following[i + 1]
    result: dict[str, list[tuple[float, float]]] = {name: [] for name in PHASES}
    before: str | None = None
    last: tuple[str, float] | None = None
    for span, name, after in zip(outer, named, following, strict=True):
        phase = name or _unnamed(before, after)
        before = name if name in PHASES else before
        if phase not in PHASES:
            last = None
            continue
        start = last[1] if last and last[0] == phase else span.start
        result[phase].append((max(start, window[0]), min(span.end, window[1])))
        last = (phase, span.end)
    return {name: union(pairs) for name, pairs in result.items()}


def _unnamed(before: str | None, after: str | None) -> str:
    """Return the phase of what no name tells, by the last and next phase that are told."""
    if before == "optimizer" and after is None:
        return "end"  # logging, saving
    updates = after == "optimizer" and before in ("backward", "optimizer")
    return "optimizer" if updates else "forward"  # the former: clipping


def _phase(name: str) -> str | None:
    """Return the phase that a span's name tells; "input" where data are waited for; None: any."""
    if name.startswith(_BACKWARD) or (name.startswith("FSDP::") and "post_backward" in name):
        return "backward"
    if name.startswith(_OPTIMIZER):
        return "optimizer"
    return "input" if name.startswith(_INPUT) else None


# -- GPU -------------------------------------------------------------------------------------


def _on_device(trace: Trace, step: int) -> Breakdown:
    """Return the breakdown of a step from its kernels."""
    span = trace.steps[step]
    host_window = (span.start, span.end)
    host = [s for s in _within(trace.host, host_window) if s is not span]
    compute = _compute_threads(trace, host)
    phases = _Lookup(_phases([s for s in host if s.thread in compute], host_window))
    window = _device_window(trace, span)
    labels = _Labels(trace.device)
    busy: dict[str, list[tuple[float, float]]] = {name: [] for name in PHASES}
    bars = []
    for kernel in trace.kernels:
        start, end = max(kernel.start, window[0]), min(kernel.end, window[1])
        if end <= start:
            continue
        kind, label = _kernel_kind(kernel, labels)
        if kind is not None:
            bars.append(Bar(start, end, kind, label))
        else:
            busy[phases.at(kernel.launched)].append((start, end))
    computing = {name: union(pairs) for name, pairs in busy.items()}
    anything = union(pair for times in computing.values() for pair in times)
    waits = {
        kind: subtract(union((b.start, b.end) for b in bars if b.kind == kind), anything)
        for kind in KINDS
    }
    # Nothing runs but a publish, and a forward kernel is what comes next.
    alone = subtract(waits["publish"], union([*waits["gather"], *waits["reduce"]]))
    later = union([*computing["backward"], *computing["optimizer"]])
    until = max((start for start, _ in computing["forward"]), default=window[0])
    until = min(until, later[0][0] if later else until)
    publish_wait = intersect(alone, [(window[0], until)])
    return _settle(trace.rank, step, "cuda", window, computing, waits, publish_wait, bars)


def _device_window(trace: Trace, span: Span) -> tuple[float, float]:
    """Return when the GPU did the step: from its first kernel to the next step's first."""
    own = [s for s in trace.device if s.name == span.name]
    if own:
        return min(s.start for s in own), max(s.end for s in own)
    launched = [k for k in trace.kernels if k.launched is not None]
    inside = [k for k in launched if span.start <= (k.launched or 0.0) < span.end]
    if not inside:
        return span.start, span.end
    return min(k.start for k in inside), max(k.end for k in inside)


class _Lookup:
    """The phase of a moment on the host: the last one that had begun."""

    def __init__(self, phases: dict[str, Intervals]) -> None:
        marks = sorted((start, name) for name, times in phases.items() for start, _ in times)
        self._starts = [start for start, _ in marks]
        self._names = [name for _, name in marks]

    def at(self, time: float | None) -> str:
        index = bisect_right(self._starts, time) - 1 if time is not None else -1
        return self._names[index] if index >= 0 else "forward"


class _Labels:
    """Our ranges as they passed on GPU streams: what a kernel belongs to."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._by_stream: dict[str, list[Span]] = {}
        for span in sorted(spans):
            if _OURS.match(span.name):
                self._by_stream.setdefault(span.thread, []).append(span)

    def of(self, kernel: Kernel) -> str | None:
        spans = self._by_stream.get(kernel.thread, [])
        index = bisect_right(spans, (kernel.start, float("inf"), "", "")) - 1
        return spans[index].name if index >= 0 and kernel.start < spans[index].end else None


def _kernel_kind(kernel: Kernel, labels: _Labels) -> tuple[str | None, str]:
    """Return the kind of communication that a kernel is, None for computation, and its label."""
    label = labels.of(kernel)
    found = _kind(label) if label else None
    if found:
        return found[0], str(label)
    for part, kind in (("all_gather_v", "gather"), ("reduce_scatter_v", "reduce")):
        if part in kernel.name:
            return kind, kernel.name
    if "publish" in kernel.name:
        return "publish", kernel.name
    nccl = _NCCL.search(kernel.name)
    if nccl:
        return _NCCL_KIND.get(nccl[1], "other"), kernel.name
    return None, kernel.name
