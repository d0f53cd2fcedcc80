"""Newton-Schulz per shape: how long it takes beside others, and how exact its products are.

In a round every candidate orthogonalises the same matrix once, and the order rotates from round to
round; ratios are taken within a round. The floor is what the operations of the chosen method take
at the rate that one large plain product reaches here in the same run. All candidates compute in the
same dtype, but for the reference (package gram-newton-schulz), which knows float16 only and stands
beside ours in float16.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch.optim import _muon as torch_muon

from torchtitan_dmuon.optim import newton_schulz as ours
from torchtitan_dmuon.optim import replay
from torchtitan_dmuon.optim.symmetric_matmul.backend import Backend, Problem
from torchtitan_dmuon.optim.symmetric_matmul.check import ALPHA, BETA, ERROR_FACTOR, Operands

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TURN_SECONDS = 0.05
RATE_SIZES = {"cuda": 8192, "cpu": 1536}
"""Rows of the large plain product that the floor's rate is taken from."""

FLOOR_GOAL, FLOOR_GOAL_ROWS = 1.3, 2048
"""Ours is to take at most this multiple of the floor, from this smaller size on."""

REFERENCE = "reference"
"""First word of the names of all forms of the package gram-newton-schulz."""

Shape = tuple[int, int]
Candidate = Callable[[torch.Tensor], torch.Tensor]


def model_shapes(models: Iterable[tuple[str, str]]) -> list[Shape]:
    """Return the distinct (rows, columns) of all matrices of models, in their order.

    Args:
        models: (family, flavor), as the registry knows them.

    Raises:
        ConfigError: it does not know one.
    """
    # Late: they import torchtitan, which takes seconds and is not needed for given shapes.
    from torchtitan_dmuon.models.matrices import model_matrices
    from torchtitan_dmuon.models.registry import get_model_spec

    shapes: dict[Shape, None] = {}
    for name, flavor in models:
        spec = get_model_spec(name, flavor, attn_backend="sdpa")
        shapes.update((matrix.shape, None) for matrix in model_matrices(spec))
    return list(shapes)


# ------------------------------------------------------------------------------------- candidates


def ours_in(dtype: torch.dtype, **options: Any) -> Candidate:
    """Return the product's, with everything that it chooses per shape."""
    return lambda matrix: replay.orthogonalize(matrix, dtype=dtype, **options)


def torch_in(dtype: torch.dtype) -> Candidate:
    """Return torch.optim.Muon's Newton-Schulz, computing in `dtype` and not in bfloat16."""

    def run(matrix: torch.Tensor) -> torch.Tensor:
        def cast(x: torch.Tensor) -> torch.Tensor:
            return x.to(dtype, copy=True)

        with mock.patch.object(torch.Tensor, "bfloat16", cast):
            return torch_muon._zeropower_via_newtonschulz(matrix, ours.QUINTIC, 5, 1e-7)

    return run


def plain_in(dtype: torch.dtype) -> Candidate:
    """Return ours with every product computed whole by torch, kernel by kernel, without a graph."""

    def run(matrix: torch.Tensor) -> torch.Tensor:
        with mock.patch.object(ours, "_CHOSEN", ours._PLAIN):
            return ours.newton_schulz(matrix, dtype=dtype)

    return run


def graphed(compute: Candidate, device: torch.device) -> Candidate:
    """Return the computation as ours runs on a GPU: a CUDA graph from the second call on."""
    if device.type != "cuda":
        return compute
    replays = replay.Replays(replay.cuda_recorder(device))
    return lambda x: replays.run((tuple(x.shape), x.dtype), compute, x)


def reference(device: torch.device, *, compiled: bool) -> tuple[dict[str, Candidate], list[str]]:
    """Return the package gram-newton-schulz, with and without its kernels.

    Args:
        device: Where it is to run.
        compiled: As the package does by default, by torch.compile into CUDA graphs, which takes
            many seconds the first time; else as it is, in a CUDA graph like ours.

    Returns:
        What could be made, by name, and what could not, in words.
    """
    try:
        from gram_newton_schulz import GramNewtonSchulz
    except ImportError as error:
        return {}, [f"gram-newton-schulz is left out: {error}"]
    found: dict[str, Candidate] = {}
    missing = []
    for kind, kernels in (("cuBLAS", False), ("kernels", True)):
        if kernels and device.type != "cuda":
            missing.append("gram-newton-schulz's kernels are left out: for CUDA GPUs only")
            continue
        try:
            if compiled:
                found[f"{REFERENCE}, {kind}"] = GramNewtonSchulz(ns_use_kernels=kernels)
            else:
                plain = GramNewtonSchulz(ns_use_kernels=kernels, compile_kwargs=None)
                found[f"{REFERENCE} in our graph, {kind}"] = graphed(plain, device)
        except Exception as error:  # Importing kernels compiles and registers: anything can fail.
            text = " ".join(str(error).split())
            missing.append(f"gram-newton-schulz's {kind} is left out: {text}")
    return found, missing


# ----------------------------------------------------------------------------------------- timing


def seconds(run: Candidate, matrix: torch.Tensor, calls: int = 1) -> float:
    """Time a call, on average over some; on a GPU until the device is done."""
    if matrix.is_cuda:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            run(matrix)
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / calls
    begin = time.perf_counter()
    for _ in range(calls):
        run(matrix)
    return (time.perf_counter() - begin) / calls


def contest(
    runs: Mapping[str, Candidate], matrix: torch.Tensor, rounds: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Let candidates take turns.

    Returns:
        Seconds per round of every candidate that runs, and by name why the others do not.
    """
    ready: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, run in runs.items():
        try:
            for _ in range(3):  # choices, kernels and recordings
                run(matrix)
            ready[name] = seconds(run, matrix)
        except Exception as error:  # One that fails is a finding; the others still count.
            failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
            print(f"{name} of {tuple(matrix.shape)}: {failed[name]}", file=sys.stderr)
    times: dict[str, list[float]] = {name: [] for name in ready}
    if not ready:
        return times, failed
    names = list(ready)
    # Short calls are timed many at once: a clock's or scheduler's hiccup is longer than they are.
    calls = max(1, round(TURN_SECONDS / max(ready.values())))
    for i in range(rounds):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(seconds(runs[name], matrix, calls))
    return times, failed


def matmul_rate(dtype: torch.dtype, device: torch.device, size: int | None = None) -> float:
    """Return the operations per second of one large plain product.

    Args:
        dtype: Of the operands.
        device: Where.
        size: Rows and columns; None: `RATE_SIZES`.
    """
    n = RATE_SIZES[device.type] if size is None else size
    a = torch.randn(n, n, device=device).to(dtype)
    for _ in range(3):
        a @ a
    best = min(seconds(lambda x: x @ x, a) for _ in range(5))
    return float(2 * n**3 / best)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and the distance between the quartiles."""
    if len(values) < 2:
        return values[0], 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, high - low


def compared(times: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return of every candidate but ours: seconds, the ratio to ours in a round, its spread."""
    result = {}
    for name, values in times.items():
        if name != "ours":
            ratios = [v / o for v, o in zip(values, times["ours"], strict=True)]
            middle, width = spread(ratios)
            result[name] = {"seconds": spread(values)[0], "over_ours": middle, "iqr": width}
    return result


def row(
    shape: Shape, times: Mapping[str, list[float]], rate: float, dtype: torch.dtype
) -> dict[str, Any]:
    """Summarise one shape: medians, and ratios to ours within a round."""
    middle = spread(times["ours"])[0]
    return {
        "rows": shape[0],
        "columns": shape[1],
        "dtype": str(dtype).removeprefix("torch."),
        "method": "gram" if ours.uses_gram(*shape) else "standard",
        "seconds": middle,
        "over_floor": middle / (ours.flops(*shape) / rate),
        **compared(times),
    }


def goals(entry: Mapping[str, Any]) -> dict[str, str]:
    """Judge a row by what Newton-Schulz is to reach on GPUs.

    Returns:
        floor: at most `FLOOR_GOAL` times the floor. reference: no form of gram-newton-schulz that
        was measured has a lower time in the median round. Each "met", "missed", "not asked for"
        (too small) or "not measured".
    """
    floor = "not asked for"
    if min(entry["rows"], entry["columns"]) >= FLOOR_GOAL_ROWS:
        floor = "met" if entry["over_floor"] <= FLOOR_GOAL else "missed"
    ratios = [v["over_ours"] for name, v in entry.items() if name.startswith(REFERENCE)]
    against = "not measured"
    if ratios:
        against = "met" if min(ratios) >= 1 else "missed"
    return {"floor": floor, "reference": against}


# --------------------------------------------------------------------------------------- accuracy


def symmetric_problems(shapes: Iterable[Shape], dtype: torch.dtype) -> list[Problem]:
    """Return the distinct symmetric products of the Newton-Schulz of matrices of these shapes."""
    problems: dict[Problem, None] = {}
    for rows, columns in shapes:
        m, k = sorted((rows, columns))
        # A tall matrix enters as its transposed view, whose columns are contiguous.
        sides = "cr" if rows > columns else "rc"
        problems[Problem("gram", False, None, m, k, m, dtype, sides)] = None
        problems[Problem("product", True, None, m, m, m, dtype, "rr")] = None
    return list(problems)


def symmetric_errors(
    problem: Problem, device: torch.device, backends: Sequence[Backend]
) -> dict[str, Any]:
    """Compare every backend's result, element by element, with the product in float64.

    Args:
        problem: What is computed, on seeded operands.
        device: Where, the float64 product too.
        backends: Plain first: the errors of others are given as multiples of its.

    Returns:
        problem: its key. plain: max and rms, the plain product's errors relative to the largest
        element and to the rms of the exact result. backends: by name max_ratio, rms_ratio and ok
        (both within what the choice of a backend allows); or off or failed, with the reason.
    """
    operands = Operands(problem, device)
    exact = operands.a.double().matmul(operands.b.double()).mul_(ALPHA)
    if operands.c is not None:
        exact.add_(operands.c, alpha=BETA)
    scales = (float(exact.abs().max()), float(exact.square().mean().sqrt()))

    def errors(backend: Backend) -> tuple[float, float]:
        result = backend(operands.a, operands.b, operands.c, ALPHA, BETA)
        off = result.double().sub_(exact)
        return float(off.abs().max()) / scales[0], float(off.square().mean().sqrt()) / scales[1]

    plain = errors(backends[0])
    # A tiny product can come out exact: half a unit in the last place is no error of others.
    least = torch.finfo(problem.dtype).eps / 2
    found: dict[str, dict[str, Any]] = {}
    for backend in backends[1:]:
        reason = backend.unavailable(device, problem.dtype, problem.shape)
        if reason is not None:
            found[backend.name] = {"off": reason}
            continue
        try:
            ratios = [e / max(p, least) for e, p in zip(errors(backend), plain, strict=True)]
        except Exception as error:  # A kernel that fails is a finding; the others still count.
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            found[backend.name] = {"failed": text}
            continue
        found[backend.name] = {
            "max_ratio": ratios[0],
            "rms_ratio": ratios[1],
            "ok": all(ratio <= ERROR_FACTOR for ratio in ratios),  # a NaN is not below anything
        }
    return {
        "problem": problem.key,
        "plain": {"max": plain[0], "rms": plain[1]},
        "backends": found,
    }
