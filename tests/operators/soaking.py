"""A job that trains on line D for long, while every rank naps at random moments.

Timing must change nothing: the losses of each rank are, bit for bit, those of the same job without
naps. Nothing may grow: memory, threads, descriptors and tensors are counted at intervals.
`scripts/soak.py` runs it at length.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import torchtitan_dmuon as dmuon
from tests.runtime.communication import Work, watch
from tests.runtime.harness import close, dedicate, full_weights, make_mesh, open_world
from tests.runtime.models import VOCABULARY, Decoder
from torchtitan_dmuon.comm.operators_communicator import OperatorsCommunicator
from torchtitan_dmuon.comm.publish import Publish
from torchtitan_dmuon.comm.streams import Event
from torchtitan_dmuon.memory import settle, status_bytes
from torchtitan_dmuon.ownership import MatrixSpec
from torchtitan_dmuon.runtime.copies import Copies
from torchtitan_dmuon.runtime.dedicate import Dedication
from torchtitan_dmuon.runtime.runtime import Runtime

PLAIN_STEPS = 4
"""Steps at the beginning that do nothing special: the pool opens in them."""

KINDS = {
    "plain": 0.5,
    "accumulate": 0.1,
    "deferred": 0.1,
    "evaluation": 0.1,
    "other shape": 0.1,
    "full parameters": 0.05,
    "new weights": 0.05,
}
"""What a step does, and its share of the steps."""

MICRO_BATCHES = 3
"""Of a step that accumulates, each reduced, or that defers (`no_sync`)."""

WIDTH = 32
BLOCKS = (("split", 4, 40, 0), ("fused", 2, 40, 0), ("interleaved", 2, 24, 2))
SPECS = {
    r"layers\.1\..*wqkv": MatrixSpec(rows=(32, 16, 16)),
    r"layers\.2\..*wqkv": MatrixSpec(rows=(16, 8, 8), blocks=2),
}

NAP_SECONDS = (0.0002, 0.004)
LONG_SECONDS = (0.03, 0.2)
OPENING = "opening"
PLACES = ("forward", "backward", "gradient", "release", "thread", "publish thread", "wait", "step")
"""Where a rank may nap; a thread is one of communication.

At one more place every rank naps, each for another time: while the pool opens, before its copies of
weights move there.
"""


@dataclass(frozen=True)
class Soak:
    """One run.

    Attributes:
        mesh: (replicate, shard).
        zero: 2 or 3.
        steps: How many.
        digest_at: Step (from 1) after which the weights are digested too.
        seed: Of data, kinds of steps and naps.
        nap_share: Share of the places passed at which a rank naps; 0: nobody ever does.
        long_share: Share of the steps in which some ranks nap for long once.
        check_every: Steps between two comparisons of the copies of weights.
        marks: How often things are counted, evenly over the run.
        timeout_seconds: Of an operation.
        told: Whether rank 0 prints how far it has come.
    """

    mesh: tuple[int, int]
    zero: int = 3
    steps: int = 2000
    digest_at: int = 300
    seed: int = 0
    nap_share: float = 0.02
    long_share: float = 0.02
    check_every: int = 50
    marks: int = 10
    timeout_seconds: float = 120
    told: bool = False


@dataclass(frozen=True)
class Mark:
    """What one rank holds after a step.

    Attributes:
        step: The step, from 1.
        resident: Bytes of its resident set, after freed memory was given back.
        shared: Bytes of /dev/shm that it has mapped.
        threads, descriptors, tensors: How many.
        gradients: Counts of `Counters` so far: hits, misses, relearned, learned, unlearned.
        milliseconds: Mean of the steps since the mark before.
    """

    step: int
    resident: int
    shared: int
    threads: int
    descriptors: int
    tensors: int
    gradients: tuple[int, ...]
    milliseconds: float


@dataclass
class Record:
    """What one rank did.

    Attributes:
        losses: Its own, of every step.
        digests: Of all weights, by step.
        marks: In order.
        comparisons: How often the copies of weights were compared, and were equal.
        kinds: Steps of each kind.
        operated: Calls of the operators.
        naps: At each place, how many; and the seconds of all of them.
    """

    losses: list[float] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    comparisons: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    operated: dict[str, int] = field(default_factory=dict)
    naps: Counter[str] = field(default_factory=Counter)
    napped_seconds: float = 0.0


class Naps:
    """Naps of one rank. Each place has a generator of its own, as threads take turns by chance."""

    def __init__(self, soak: Soak, rank: int) -> None:
        self._soak = soak
        self._random = {p: random.Random(f"{soak.seed} {rank} {p}") for p in (*PLACES, OPENING)}
        self._steps = random.Random(f"{soak.seed} {rank} long")
        self._lock = threading.Lock()
        self._long = ""
        self.count: Counter[str] = Counter()
        self.seconds = 0.0

    def begin_step(self, step: int) -> None:
        """Decide whether this rank naps for long in a step, and where."""
        together = random.Random(f"{self._soak.seed} {step} long")
        mine = self._steps.random() < 0.4, self._steps.choice(PLACES)
        self._long = mine[1] if together.random() < self._soak.long_share and mine[0] else ""

    def take(self, place: str) -> None:
        """Nap here, or not."""
        draw = self._random[place]
        with self._lock:
            seconds = draw.uniform(*NAP_SECONDS) if draw.random() < self._soak.nap_share else 0.0
            if place == self._long:
                self._long, seconds = "", draw.uniform(*LONG_SECONDS)
            if place == OPENING and self._soak.nap_share:
                seconds = draw.uniform(0.0, LONG_SECONDS[1])
            if seconds:
                self.count[place] += 1
                self.seconds += seconds
        if seconds:
            time.sleep(seconds)

    def everywhere(self, model: nn.Module) -> None:
        """Nap in this process's communication and in the model's forward and backward, for good."""

        def around(kind: str, label: str, work: Work) -> Work:
            def late() -> None:
                self.take("thread")
                work()

            return late

        watch(around)
        _nap_in_publish(self)
        _nap_while_opening(self)
        for module in model.layers:  # type: ignore[union-attr]
            module.register_forward_pre_hook(lambda *_: self.take("forward"))
            module.register_forward_hook(self._after_forward)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: self.take("gradient"))

    def _after_forward(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: self.take("backward"))


class _Late(Event):
    """Comes late to the thread that waits for it."""

    def __init__(self, naps: Naps) -> None:
        self._naps = naps

    def wait(self) -> None:
        self._naps.take("publish thread")


def _nap_in_publish(naps: Naps) -> None:
    start, release, wait = Publish.start, Publish.release, Publish.wait

    def starting(self: Publish, step: int, after: Sequence[Event] = ()) -> Event:
        return start(self, step, (*after, _Late(naps)))

    def releasing(self: Publish, task: int) -> None:
        naps.take("release")
        release(self, task)

    def waiting(self: Publish, *tasks: int, name: str | None = None) -> None:
        naps.take("wait")
        wait(self, *tasks, name=name)

    Publish.start = starting  # type: ignore[method-assign]
    Publish.release = releasing  # type: ignore[method-assign]
    Publish.wait = waiting  # type: ignore[method-assign]


def _nap_while_opening(naps: Naps) -> None:
    install = Copies.install

    def installing(self: Copies, memory: torch.Tensor) -> None:
        naps.take(OPENING)
        install(self, memory)

    Copies.install = installing  # type: ignore[method-assign]


def kind_of(soak: Soak, step: int) -> str:
    """Return what a step (from 1) does: the same on every rank, with naps or without."""
    if step <= PLAIN_STEPS:
        return "plain"
    draw = random.Random(f"{soak.seed} {step} kind")
    return draw.choices(list(KINDS), list(KINDS.values()))[0]


class Job:
    """The model in training, on one rank."""

    def __init__(self, soak: Soak) -> None:
        self.soak = soak
        torch.manual_seed(soak.seed)
        self.model = Decoder(BLOCKS, width=WIDTH)
        self.naps = Naps(soak, dist.get_rank())
        self.owned: Dedication = dedicate(
            self.model,
            make_mesh(soak.mesh),
            communication="operators",
            matrix_specs=SPECS,
            reshard_after_forward=soak.zero == 3,
            timeout=timedelta(seconds=soak.timeout_seconds),
        )
        self.naps.everywhere(self.model)
        self.optimizer = dmuon.Muon(self.model, lr=0.005, ns_dtype=torch.float32)
        self.record = Record()

    @property
    def runtime(self) -> Runtime:
        return self.owned.runtime

    def loss(self, step: int, micro: int, shape: tuple[int, int]) -> torch.Tensor:
        """Cross-entropy of a fixed permutation of random tokens (sequences, length)."""
        seed = (self.soak.seed * 1_000_003 + step) * 97 + micro * 31 + dist.get_rank() + 1
        tokens = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))
        logits = self.model(tokens)
        return F.cross_entropy(logits.flatten(0, 1), (tokens * 7 % VOCABULARY).flatten())

    def train(self, step: int) -> float:
        """Take a step; return this rank's loss."""
        kind, total = kind_of(self.soak, step), torch.zeros(())
        shape = (2, 12) if kind != "other shape" else (1 + step % 3, 5 + step % 11)
        if kind == "evaluation":
            self.evaluate(step)
        elif kind == "new weights":
            # Before the step: copies follow their masters in the next forward only.
            self.scale_weights()
        several = MICRO_BATCHES if kind in ("accumulate", "deferred") else 1
        self.optimizer.zero_grad()
        for micro in range(several):
            held_back = kind == "deferred" and micro < several - 1
            with dmuon.no_sync(self.model) if held_back else nullcontext():
                loss = self.loss(step, micro, shape) / several
                loss.backward()
            total += loss.detach()
        self.naps.take("step")
        self.optimizer.step()
        if kind == "full parameters":
            self.record.digests[step] = self.digest()
        self.record.kinds[kind] += 1
        return float(total)

    def evaluate(self, step: int) -> None:
        self.model.eval()
        with torch.no_grad():
            self.loss(step, MICRO_BATCHES, (1, 9))
        self.model.train()

    def scale_weights(self) -> None:
        """Write new owned weights from outside, as loading a checkpoint does."""
        with dmuon.full_params(self.model, writeback=True), torch.no_grad():
            for parameter in self.owned.parameters:
                parameter.mul_(0.999)

    def digest(self) -> str:
        """Return a digest of all weights' bits. Collective."""
        weights = full_weights(self.model)
        return hashlib.sha256(
            b"".join(weights[name].numpy().tobytes() for name in sorted(weights))
        ).hexdigest()[:16]

    def compare_copies(self) -> None:
        """Raise RuntimeError unless all copies of weights have the same bits."""
        dmuon.check_replicas(self.model)
        for group in self.runtime.groups:
            for segment, master in group.masters.items():
                copy = group.copies.get(segment)
                if copy is not None and not torch.equal(master.to(copy.dtype), copy):
                    name = group.parameters[segment.parameter].name
                    raise RuntimeError(f"{name}: its owner's copy is not its master")
        self.record.comparisons += 1

    def mark(self, step: int, milliseconds: float) -> None:
        """Count what this rank holds between two steps."""
        self.optimizer.zero_grad()
        dmuon.wait_for_publish(self.model)
        counters = self.runtime.hit_counters()
        gradients = (
            (counters.hits, counters.misses, counters.relearned)
            + (counters.learned, counters.unlearned)
            if counters
            else (0,) * 5
        )
        settle()
        self.record.marks.append(
            Mark(
                step,
                status_bytes("VmRSS"),
                shared_bytes(),
                len(os.listdir("/proc/self/task")),
                len(os.listdir("/proc/self/fd")),
                sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
                gradients,
                milliseconds,
            )
        )


def shared_bytes() -> int:
    """Return the bytes of /dev/shm that this process has mapped."""
    found = re.findall(
        r"^([0-9a-f]+)-([0-9a-f]+) .* /dev/shm/", Path("/proc/self/maps").read_text(), re.M
    )
    return sum(int(end, 16) - int(begin, 16) for begin, end in found)


def run(soak: Soak, tamper: Callable[[], None] | None = None) -> Record:
    """Train; called by every rank of the mesh. `tamper` breaks something first."""
    open_world(soak.timeout_seconds)
    if tamper is not None:
        tamper()
    job = Job(soak)
    marked = {soak.steps * part // soak.marks for part in range(1, soak.marks + 1)}
    start = since = time.monotonic()
    before = 0
    for step in range(1, soak.steps + 1):
        job.naps.begin_step(step)
        job.record.losses.append(job.train(step))
        if step % soak.check_every == 0 or step == soak.steps:
            job.compare_copies()
        if step in (soak.digest_at, soak.steps):
            job.record.digests[step] = job.digest()
        if step in marked:
            now = time.monotonic()
            job.mark(step, 1e3 * (now - since) / (step - before))
            if soak.told and dist.get_rank() == 0:
                _tell(soak, job.record, now - start)
            since, before = time.monotonic(), step
    communicator = job.runtime.communicator
    assert isinstance(communicator, OperatorsCommunicator)
    job.record.operated = dict(communicator.operated)
    job.record.naps, job.record.napped_seconds = job.naps.count, job.naps.seconds
    close(job.owned)
    dist.destroy_process_group()
    return job.record


def _tell(soak: Soak, record: Record, seconds: float) -> None:
    mark = record.marks[-1]
    left = seconds / mark.step * (soak.steps - mark.step)
    print(
        f"step {mark.step} of {soak.steps}: loss {record.losses[-1]:.4f}, "
        f"{mark.milliseconds:.0f} ms a step, {mark.resident / 2**20:.1f} MiB, "
        f"{left / 60:.1f} min left",
        file=sys.stderr,
        flush=True,
    )


# -- what must hold --------------------------------------------------------------------------------

HIT_RATE = 0.999
GROWTH_SHARE, GROWTH_BYTES = 0.01, 8 * 2**20


def hit_rate(first: Mark, last: Mark) -> float:
    """Hits among the gradients with a known signature between two marks."""
    hits, misses = (last.gradients[i] - first.gradients[i] for i in (0, 1))
    return hits / (hits + misses) if hits + misses else 0.0


def grown(records: Sequence[Record]) -> list[str]:
    """Say what grew between the first mark and the last one, or was not born in its place."""
    found = []
    for rank, record in enumerate(records):
        first, last = record.marks[0], record.marks[-1]
        limit = first.resident * GROWTH_SHARE + GROWTH_BYTES
        if last.resident - first.resident > limit:
            found.append(
                f"rank {rank}: its memory grew by {(last.resident - first.resident) / 2**20:.1f} "
                f"MiB from step {first.step} to {last.step}, expected {limit / 2**20:.1f} at most"
            )
        for what in ("shared", "threads", "descriptors", "tensors"):
            before, after = getattr(first, what), getattr(last, what)
            if after > before:
                found.append(f"rank {rank}: {what} grew from {before} to {after}")
        if hit_rate(first, last) < HIT_RATE:
            found.append(
                f"rank {rank}: {hit_rate(first, last):.4%} of the gradients were born in their "
                f"places, expected {HIT_RATE:.1%} or more"
            )
    return found


def different(quiet: Sequence[Record], soaked: Sequence[Record]) -> list[str]:
    """Say where two runs of the same job differ, in as many steps as the first one took."""
    found = []
    for rank, (one, other) in enumerate(zip(quiet, soaked, strict=True)):
        steps = len(one.losses)
        pairs = zip(one.losses, other.losses[:steps], strict=True)
        # The bits, by repr: NaN is equal to itself there, and -0.0 is not 0.0.
        step = next((i for i, pair in enumerate(pairs, 1) if repr(pair[0]) != repr(pair[1])), None)
        if step is not None:
            values = one.losses[step - 1], other.losses[step - 1]
            found.append(f"rank {rank}: the loss of step {step} is {values[1]}, was {values[0]}")
        both = one.digests.keys() & other.digests.keys()
        if steps not in both:
            found.append(f"rank {rank}: no digest of the weights after step {steps}")
        found += [
            f"rank {rank}: the weights differ after step {s}"
            for s in sorted(both)
            if one.digests[s] != other.digests[s]
        ]
    return found


def apart(records: Sequence[Record]) -> list[str]:
    """Say after which steps ranks saw different full weights, or a loss that is not finite."""
    found = [
        f"rank {rank}: its full weights after step {step} are not those of rank 0"
        for rank, record in enumerate(records)
        for step, digest in record.digests.items()
        if digest != records[0].digests[step]
    ]
    return found + [
        f"rank {rank}: a loss is not finite"
        for rank, record in enumerate(records)
        if not all(abs(loss) < float("inf") for loss in record.losses)
    ]
