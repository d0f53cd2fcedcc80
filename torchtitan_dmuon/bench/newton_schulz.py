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


def replayed(device: torch.device) -> int:
    """Return how many of our computations on a device are recorded as CUDA graphs."""
    return replay._replays(device).recorded if device.type == "cuda" else 0


def reference(
    device: torch.device, *, compiled: bool
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Return the package gram-newton-schulz, with and without its kernels.

    Args:
        device: Where it is to run.
        compiled: As the package does by default, by torch.compile into CUDA graphs, which takes
            many seconds the first time; else as it is, in a CUDA graph like ours.

    Returns:
        What could be made, by name, and by name why the others could not.
    """
    found: dict[str, Candidate] = {}
    missing: dict[str, str] = {}
    form = "" if compiled else " in our graph"
    for kind, kernels in (("cuBLAS", False), ("kernels", True)):
        name = f"{REFERENCE}{form}, {kind}"
        if kernels and device.type != "cuda":
            missing[name] = "for CUDA GPUs only"
            continue
        try:
            from gram_newton_schulz import GramNewtonSchulz

            if compiled:
                found[name] = GramNewtonSchulz(ns_use_kernels=kernels)
            else:
                plain = GramNewtonSchulz(ns_use_kernels=kernels, compile_kwargs=None)
                found[name] = graphed(plain, device)
        except Exception as error:  # Importing kernels compiles and registers: anything can fail.
            missing[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
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


@torch.no_grad()
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


def time_shape(shape: Shape, device: torch.device, rate: float, rounds: int) -> dict[str, Any]:
    """Compare ours in float16 with plain products, torch's and the reference in a graph like ours.

    Args:
        shape: Of a seeded matrix.
        device: Where.
        rate: `matmul_rate` in float16.
        rounds: Timed rounds.

    Returns:
        A `row`, with replayed (ours ran as a CUDA graph), goals, compiled_reference for
        `add_compiled`, and failed: reasons by candidate. Only the last and the shape if ours fails.
    """
    others, missing = reference(device, compiled=False)
    runs = {
        "ours": ours_in(torch.float16),
        "plain products": plain_in(torch.float16),
        "torch.optim.Muon": torch_in(torch.float16),
        **others,
    }
    before = replayed(device)
    times, failed = contest(runs, seeded(shape, device), rounds)
    failed |= missing
    if "ours" not in times:
        return {"rows": shape[0], "columns": shape[1], "failed": failed}
    entry = row(shape, times, rate, torch.float16)
    entry["replayed"] = replayed(device) > before
    entry["goals"] = goals(entry)
    return {**entry, "compiled_reference": "left out: no time left", "failed": failed}


def add_compiled(entry: dict[str, Any], device: torch.device, rounds: int) -> None:
    """Compare ours with the reference as it runs by default, in one more contest.

    Args:
        entry: Of `time_shape`; changed, and judged anew.
        device: Where.
        rounds: Timed rounds.
    """
    if device.type != "cuda":
        entry["compiled_reference"] = "left out: for CUDA GPUs only"
        return
    # Compiled for this shape alone: else torch.compile gives up after a few shapes.
    torch.compiler.reset()
    others, missing = reference(device, compiled=True)
    runs = {"ours": ours_in(torch.float16), **others}
    matrix = seeded((entry["rows"], entry["columns"]), device)
    times, failed = contest(runs, matrix, rounds)
    failed |= missing
    entry["failed"] |= failed
    if "ours" in times:
        entry |= compared(times)
        entry["goals"] = goals(entry)
    without = [name for name in failed if name.startswith(REFERENCE)]
    entry["compiled_reference"] = f"failed: {', '.join(without)}" if without else "measured"


def seeded(shape: Shape, device: torch.device) -> torch.Tensor:
    """Return the float32 matrix that is orthogonalised."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device)


def tally(entries: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the number of rows by goal and verdict."""
    found: dict[str, dict[str, int]] = {"floor": {}, "reference": {}}
    for entry in entries:
        for goal, verdict in entry.get("goals", {}).items():
            found[goal][verdict] = found[goal].get(verdict, 0) + 1
    return found


# --------------------------------------------------------------------------------------- accuracy


def symmetric_problems(shapes: Iterable[Shape], dtype: torch.dtype) -> list[Problem]:
    """Return the distinct symmetric products of the Newton-Schulz of matrices of these shapes."""
    problems: dict[Problem, None] = {}
    for rows, columns in shapes:
        m, k = sorted((rows, columns))
        # A tall matrix enters as its transposed view, whose columns are contiguous; after a restart
        # it is row-major.
        for sides in ("cr", "rc") if rows > columns else ("rc",):
            problems[Problem("gram", False, None, m, k, m, dtype, sides)] = None
        problems[Problem("product", True, None, m, m, m, dtype, "rr")] = None
    return list(problems)


@torch.no_grad()
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
