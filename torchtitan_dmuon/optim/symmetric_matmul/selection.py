"""Which backend computes a problem: measured the first time it appears, then looked up."""

from __future__ import annotations

import logging
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
            RuntimeError: it would have to be measured while a CUDA graph is being captured.
        """
        measurable = device.type in ("cpu", "cuda") and problem.n and 0 not in problem.shape
        if problem.m < MIN_SYMMETRIC_SIZE or not measurable:
            return self._plain
        candidates = {
            name: backend
            for name, backend in self._backends.items()
            if (backend.any_product or problem.kind != "any")
            and backend.unavailable(device, problem.dtype, problem.shape) is None
        }
        if len(candidates) == 1:
            return self._plain
        with self._lock:
            known = self._measured.get(device, {}).get(problem.key)
            known = known or self.store(device).choices().get(problem.key)
            if known is not None and known.backend in candidates:
                return candidates[known.backend]
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"symmetric_matmul: {problem.key} appears for the first time while a CUDA "
                    "graph is captured, where it can not be measured; call it once before"
                )
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
        _report(problem, kept, self._plain.name)
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
        operands = Operands(problem, device)
        reference = Reference(operands)

        def call(backend: Backend) -> torch.Tensor:
            return backend(operands.a, operands.b, operands.c, ALPHA, BETA)

        def whole(backend: Backend) -> Callable[[], float]:
            return watch(lambda: call(backend), device)

        # On a CPU without units for 16-bit numbers the plain product can take minutes.
        estimate = None
        if device.type == "cpu" and problem.dtype in HALF and problem.m > TRIAL_ROWS:
            estimate, error = _trial(problem, operands, reference, plain, watch)
        else:
            error = reference.error(call(plain))
        limit = error_limit(error, problem.dtype)

        dropped: dict[str, str] = {}
        entrants: dict[str, Callable[[], float]] = {}

        def admit(backend: Backend) -> None:
            try:
                reason = _fault(reference, operands, call(backend), limit)
                if reason is None:
                    entrants[backend.name] = whole(backend)
            except torch.OutOfMemoryError:
                raise
            except Exception as e:  # Whatever a kernel raises, training goes on without it.
                reason = f"{type(e).__name__}: {' '.join(str(e).split())}"
            if reason is not None:
                dropped[backend.name] = reason

        for backend in candidates[1:]:
            if not backend.made_of_plain:
                admit(backend)
        seconds = {}
        if estimate is not None and entrants:
            first = min(once() for once in entrants.values())
            if estimate > SLOW_FACTOR * first:
                seconds[plain.name] = estimate
        if not seconds:
            entrants[plain.name] = whole(plain)
            for backend in candidates[1:]:
                if backend.made_of_plain:
                    admit(backend)
        seconds |= race(entrants)
    best = min(seconds, key=lambda name: seconds[name])
    if seconds[best] * MARGIN > seconds[plain.name]:
        best = plain.name
    return Choice(best, seconds, dropped)


def _trial(
    problem: Problem,
    operands: Operands,
    reference: Reference,
    plain: Backend,
    watch: Stopwatch,
) -> tuple[float, float]:
    """Return the plain product's estimated seconds and its error, from its first rows."""
    a, b, c = operands.rows(TRIAL_ROWS)
    once = watch(lambda: plain(a, b, c, ALPHA, BETA), a.device)
    error = reference.error(plain(a, b, c, ALPHA, BETA))
    return once() * problem.shape[0] * problem.m / TRIAL_ROWS, error


def _fault(
    reference: Reference, operands: Operands, result: torch.Tensor, limit: float
) -> str | None:
    """Return what is wrong with a candidate's result, or None."""
    a = operands.a
    shape = (*a.shape[:-1], operands.b.size(-1))
    if tuple(result.shape) != shape or result.dtype != a.dtype:
        return f"returns {tuple(result.shape)} {result.dtype} where {shape} {a.dtype} is expected"
    error = reference.error(result)
    if not error <= limit:
        what = "not finite" if math.isinf(error) else f"{error:.1e}"
        return f"error of a row {what}, allowed {limit:.1e}"
    return None


def _report(problem: Problem, choice: Choice, plain: str) -> None:
    for name, reason in choice.dropped.items():
        logger.warning(f"symmetric_matmul: {name} is not used for {problem.key}: {reason}")
    if logger.isEnabledFor(logging.INFO):
        ratio = choice.seconds[plain] / choice.seconds[choice.backend]
        logger.info(
            f"{problem.key}: {choice.backend}, "
            f"{choice.seconds[choice.backend] * 1000:.3g} ms, {ratio:.2f}x the speed of plain"
        )
