"""Which backend computes a problem: measured the first time it appears, then looked up."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import platformdirs
import torch

from torchtitan_dmuon.log import logger
from torchtitan_dmuon.optim.symmetric_matmul.backend import HALF, Backend, Problem
from torchtitan_dmuon.optim.symmetric_matmul.check import (
    ALPHA,
    BETA,
    TRIAL_ROWS,
    Operands,
    Reference,
    error_limit,
)
from torchtitan_dmuon.optim.symmetric_matmul.identity import identity
from torchtitan_dmuon.optim.symmetric_matmul.store import Choice, Store
from torchtitan_dmuon.optim.symmetric_matmul.timing import Stopwatch, race, stopwatch

MIN_SYMMETRIC_SIZE = 256
"""Smallest m that is measured; below it the plain product takes a launch and little more."""

MIN_HALF_SIZE = 32
"""The same for 16-bit products on CPUs."""

MARGIN = 1.03
"""A backend must be faster than plain by this factor: differences below it are noise."""

SLOW_FACTOR = 3.0
"""A plain product estimated to take this multiple of the best other one is not run whole, nor is
what is made of plain products, which saves half of the work at most."""


class Selector:
    """Choices of one process, on all its devices.

    Args:
        backends: The first is the plain one, the reference, which is always available.
        folder: Of the files of choices; None: symmetric_matmul in the user's cache folder.
        watch: How calls are timed.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        folder: Path | None = None,
        watch: Stopwatch = stopwatch,
    ) -> None:
        self._plain = backends[0]
        self._backends = {backend.name: backend for backend in backends}
        self._folder = folder
        self._watch = watch
        self._stores: dict[torch.device, Store] = {}
        self._measured: dict[torch.device, dict[str, Choice]] = {}
        self._lock = threading.RLock()
        self.calls: Counter[str] = Counter()
        """Calls by backend; replays of a CUDA graph call nothing."""

    @property
    def backends(self) -> tuple[Backend, ...]:
        return tuple(self._backends.values())

    def store(self, device: torch.device) -> Store:
        """Return the file of a device's choices."""
        with self._lock:
            if device not in self._stores:
                folder = self._folder or (
                    Path(platformdirs.user_cache_dir("torchtitan_dmuon")) / "symmetric_matmul"
                )
                self._stores[device] = Store(folder, identity(device), frozenset(self._backends))
            return self._stores[device]

    def choices(self, device: torch.device) -> dict[str, Choice]:
        """Return what is chosen by problem: on disk, and what could be kept in memory only."""
        return {**self.store(device).read()[0], **self._measured.get(device, {})}

    def choose(self, problem: Problem, device: torch.device) -> Backend:
        """Return the backend for a problem, measuring it if no process has yet.

        Raises:
            RuntimeError: there is something to choose while a CUDA graph is being captured.
        """
        measurable = device.type in ("cpu", "cuda") and problem.n and 0 not in problem.shape
        # A CPU without units for 16 bits takes tens of times as long natively at any size.
        halves = device.type == "cpu" and problem.dtype in HALF
        if not measurable or problem.m < (MIN_HALF_SIZE if halves else MIN_SYMMETRIC_SIZE):
            return self._plain
        candidates = {
            name: backend
            for name, backend in self._backends.items()
            if (backend.any_product or problem.kind != "any")
            and backend.unavailable(device, problem.dtype, problem.shape) is None
        }
        if len(candidates) == 1:
            return self._plain
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Not even if the file knows the answer: kernels compile at their first call.
            raise RuntimeError(
                f"symmetric_matmul: {problem.key} appears for the first time while a CUDA graph is "
                "captured, where it can not be measured; call it once before"
            )
        with self._lock:
            known = self._measured.get(device, {}).get(problem.key)
            known = known or self.store(device).choices().get(problem.key)
            if known is not None and known.backend in candidates:
                return candidates[known.backend]
            return candidates[self._decide(problem, device, candidates).backend]

    def _decide(
        self, problem: Problem, device: torch.device, candidates: Mapping[str, Backend]
    ) -> Choice:
        """Measure, keep the result, and return the choice that counts."""
        try:
            choice = measure(problem, device, list(candidates.values()), self._watch)
        except torch.OutOfMemoryError:
            logger.warning(
                f"symmetric_matmul: not enough free memory to measure {problem.key}; "
                "this process uses the plain product"
            )
            # Not for the disk: the next run may have the memory.
            choice = Choice(self._plain.name, {})
            self._measured.setdefault(device, {})[problem.key] = choice
            return choice
        kept = self.store(device).add(problem.key, choice, candidates.__contains__)
        self._measured.setdefault(device, {})[problem.key] = kept
        logger.info(
            f"{problem.key}: {kept.backend}, {kept.seconds[kept.backend] * 1000:.3g} ms; all: "
            + ", ".join(f"{name} {t * 1000:.3g} ms" for name, t in kept.seconds.items())
        )
        return kept


def measure(
    problem: Problem, device: torch.device, candidates: Sequence[Backend], watch: Stopwatch
) -> Choice:
    """Check and time candidates on seeded data, and choose.

    Args:
        problem: What is computed.
        device: Where.
        candidates: The first is plain, the reference of errors and of time.
        watch: How calls are timed.

    Raises:
        torch.OutOfMemoryError: there is not enough memory for one more product of this size.
    """
    plain = candidates[0]
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        contest = _Contest(problem, device, watch)
        # On a CPU without units for 16-bit numbers the plain product can take minutes.
        estimate = None
        if device.type == "cpu" and problem.dtype in HALF and problem.m > TRIAL_ROWS:
            estimate = contest.try_rows(plain)
        else:
            contest.run_reference(plain)
        for backend in candidates[1:]:
            if not backend.made_of_plain:
                contest.admit(backend)
        slow = [backend for backend in candidates if backend.made_of_plain]
        if estimate is not None and contest.entrants:
            best = min(once() for once in contest.entrants.values())
            if estimate > SLOW_FACTOR * best:
                reason = (
                    f"not run whole: the plain product takes about {estimate:.2g} s, going by its "
                    f"first {TRIAL_ROWS} rows"
                )
                contest.dropped |= {backend.name: reason for backend in slow}
                slow = []
        for backend in slow:
            if backend is plain:
                contest.enter(plain)
            else:
                contest.admit(backend)
        seconds = race(contest.entrants)
    winner = min(seconds, key=lambda name: seconds[name])
    if seconds[winner] * MARGIN > seconds.get(plain.name, math.inf):
        winner = plain.name
    return Choice(winner, seconds, contest.dropped)


class _Contest:
    """Who may race, and who was dropped why, on the operands of one problem."""

    def __init__(self, problem: Problem, device: torch.device, watch: Stopwatch) -> None:
        self._problem = problem
        self._device = device
        self._watch = watch
        self._operands = Operands(problem, device)
        self._reference = Reference(self._operands)
        self._limit = 0.0
        self.entrants: dict[str, Callable[[], float]] = {}
        self.dropped: dict[str, str] = {}

    def _call(self, backend: Backend) -> torch.Tensor:
        operands = self._operands
        return backend(operands.a, operands.b, operands.c, ALPHA, BETA)

    def run_reference(self, plain: Backend) -> None:
        """Take the error of the plain product as the measure of others."""
        error = self._reference.error(self._call(plain))
        self._limit = error_limit(error, self._problem.dtype)

    def try_rows(self, plain: Backend) -> float:
        """Do the same with its first rows, and return the seconds that all of them would take."""
        a, b, c = self._operands.rows(TRIAL_ROWS)
        error = self._reference.error(plain(a, b, c, ALPHA, BETA))
        self._limit = error_limit(error, self._problem.dtype)
        seconds = self._watch(lambda: plain(a, b, c, ALPHA, BETA), self._device)()
        return seconds * self._problem.shape[0] * self._problem.m / TRIAL_ROWS

    def enter(self, backend: Backend) -> None:
        self.entrants[backend.name] = self._watch(lambda: self._call(backend), self._device)

    def admit(self, backend: Backend) -> None:
        """Enter a backend whose result is right; drop any other, whatever it raises."""
        try:
            reason = self._fault(self._call(backend))
            if reason is None:
                self.enter(backend)
                return
        except torch.OutOfMemoryError:
            raise
        except Exception as e:  # Training goes on without it.
            reason = f"{type(e).__name__}: {' '.join(str(e).split())}"
        # It is kept in the file and printed; a driver's text may hold anything.
        reason = "".join(c if c.isprintable() else "?" for c in reason)
        self.dropped[backend.name] = reason
        logger.warning(
            f"symmetric_matmul: {backend.name} is not used for {self._problem.key}: {reason}"
        )

    def _fault(self, result: torch.Tensor) -> str | None:
        """Return what is wrong with a result, or None."""
        a, b = self._operands.a, self._operands.b
        shape = (*a.shape[:-1], b.size(-1))
        if tuple(result.shape) != shape or result.dtype != a.dtype:
            got = f"{tuple(result.shape)} {result.dtype}"
            return f"returns {got} where {shape} {a.dtype} is expected"
        error = self._reference.error(result)
        if error <= self._limit:
            return None
        what = "not finite" if math.isinf(error) else f"{error:.1e}"
        return f"error of a row {what}, allowed {self._limit:.1e}"
