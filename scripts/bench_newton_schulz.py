#!/usr/bin/env python3
"""How long Newton-Schulz takes, shape by shape, against torch.optim.Muon's and the reference.

In a round every candidate orthogonalises the same matrix once, and the order rotates from round to
round; ratios are taken within a round. The floor is what the operations of the chosen method take
at the rate that one large plain product reaches here in the same run. All candidates compute in the
same dtype, but for the reference, which knows float16 only and stands beside ours in float16.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import tyro
from torch.optim import _muon as torch_muon

from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.costs import parse_shapes
from torchtitan_dmuon.optim.newton_schulz import QUINTIC, flops, uses_gram
from torchtitan_dmuon.optim.replay import orthogonalize

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TURN_SECONDS = 0.05
Candidate = Callable[[torch.Tensor], torch.Tensor]


@dataclass(kw_only=True, slots=True)
class Options:
    """Time Newton-Schulz per shape against torch.optim.Muon's, in turns, and compare."""

    shapes: list[str] = field(
        default_factory=lambda: ["qwen2_5:debug", "qwen2_5:0.5B", "qwen2_5:1.5B"]
    )
    """Matrices as ROWSxCOLUMNS, and models as FAMILY:FLAVOR."""

    dtype: str = "auto"
    """float32, bfloat16 or float16; auto: float16 on a GPU, float32 on a CPU."""

    rounds: int = 7
    """Timed rounds."""

    experts: int = 0
    """
    Also time this many matrices of the first shape in one call, against one by one (e.g. 60).
    """

    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """cuda or cpu."""

    json: str = ""
    """File to write the figures to as well."""


def torch_in(dtype: torch.dtype) -> Candidate:
    """Return torch.optim.Muon's Newton-Schulz, computing in `dtype` and not in bfloat16."""

    def run(matrix: torch.Tensor) -> torch.Tensor:
        def cast(x: torch.Tensor) -> torch.Tensor:
            return x.to(dtype, copy=True)

        with mock.patch.object(torch.Tensor, "bfloat16", cast):
            return torch_muon._zeropower_via_newtonschulz(matrix, QUINTIC, 5, 1e-7)

    return run


def ours_in(dtype: torch.dtype, **options: Any) -> Candidate:
    """Return the product's, with everything that it chooses per shape."""
    return lambda matrix: orthogonalize(matrix, dtype=dtype, **options)


def reference() -> dict[str, Candidate]:
    """Return the package gram-newton-schulz, with and without its kernels, where it runs."""
    if not torch.cuda.is_available():
        return {}  # its float16 products have no fast form on CPUs
    try:
        from gram_newton_schulz import GramNewtonSchulz
    except ImportError as error:
        print(f"gram-newton-schulz is left out: {error}", file=sys.stderr)
        return {}
    found: dict[str, Candidate] = {"reference, cuBLAS": GramNewtonSchulz(ns_use_kernels=False)}
    try:
        found["reference, kernels"] = GramNewtonSchulz()
    except ImportError as error:
        print(f"gram-newton-schulz's kernels are left out: {error}", file=sys.stderr)
    return found


def candidates(dtype: torch.dtype) -> dict[str, Candidate]:
    """Return what is compared, ours first."""
    return {
        "ours": ours_in(dtype),
        "ours, standard": ours_in(dtype, method="standard"),
        "torch.optim.Muon": torch_in(dtype),
        **(reference() if dtype == torch.float16 else {}),
    }


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
    runs: dict[str, Candidate], matrix: torch.Tensor, rounds: int
) -> dict[str, list[float]]:
    """Return seconds per round of every candidate, in turns."""
    for run in runs.values():
        for _ in range(3):  # choices, kernels and recordings
            run(matrix)
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    # Short calls are timed many at once: a clock's or scheduler's hiccup is longer than they are.
    calls = max(1, round(TURN_SECONDS / max(seconds(run, matrix) for run in runs.values())))
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            times[name].append(seconds(runs[name], matrix, calls))
    return times


def matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Return the operations per second of one large plain product."""
    n = 8192 if device.type == "cuda" else 1536
    a = torch.randn(n, n, device=device).to(dtype)
    contest({"product": lambda x: x @ x}, a, 1)
    best = min(seconds(lambda x: x @ x, a) for _ in range(5))
    return float(2 * n**3 / best)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and the distance between the quartiles."""
    if len(values) < 2:
        return values[0], 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, high - low


def row(
    shape: tuple[int, int], times: dict[str, list[float]], rate: float, dtype: torch.dtype
) -> dict[str, Any]:
    """Summarise one shape: medians, and ratios to ours within a round."""
    ours = times["ours"]
    result: dict[str, Any] = {
        "rows": shape[0],
        "columns": shape[1],
        "dtype": str(dtype).removeprefix("torch."),
        "method": "gram" if uses_gram(*shape) else "standard",
        "seconds": spread(ours)[0],
        "over_floor": spread(ours)[0] / (flops(*shape) / rate),
    }
    for name, values in times.items():
        if name != "ours":
            ratios = [v / o for v, o in zip(values, ours, strict=True)]
            middle, width = spread(ratios)
            result[name] = {"seconds": spread(values)[0], "over_ours": middle, "iqr": width}
    return result


def shown(entry: dict[str, Any]) -> str:
    shape = f"{entry['rows']} x {entry['columns']}"
    if "together" in entry:
        shape = f"{entry['together']} of {shape}"
    parts = [f"{shape:<20} {entry['method']:<9} {1e3 * entry['seconds']:>10.3f} ms"]
    if "over_floor" in entry:
        parts.append(f"{entry['over_floor']:>5.2f} x floor")
    for name, value in entry.items():
        if isinstance(value, dict):
            parts.append(f"{name} {value['over_ours']:.2f} ({value['iqr']:.2f})")
    return "  ".join(parts)


def together(count: int, shape: tuple[int, int], dtype: torch.dtype, o: Options) -> dict[str, Any]:
    """Compare a batch in one call with its matrices one by one."""
    torch.manual_seed(0)
    batch = torch.randn(count, *shape, device=o.device)
    run = ours_in(dtype)
    runs: dict[str, Candidate] = {
        "ours": run,
        "one by one": lambda matrices: torch.stack([run(m) for m in matrices.unbind()]),
    }
    times = contest(runs, batch, o.rounds)
    ratios = [b / a for a, b in zip(times["ours"], times["one by one"], strict=True)]
    middle, width = spread(ratios)
    return {
        "rows": shape[0],
        "columns": shape[1],
        "together": count,
        "dtype": str(dtype).removeprefix("torch."),
        "method": "gram" if uses_gram(*shape) else "standard",
        "seconds": spread(times["ours"])[0],
        "one by one": {
            "seconds": spread(times["one by one"])[0],
            "over_ours": middle,
            "iqr": width,
        },
    }


def every_shape(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Return the distinct shapes that options name. Raises ConfigError."""
    shapes, models = parse_shapes(texts)
    if models:
        from torchtitan_dmuon.models.matrices import model_matrices
        from torchtitan_dmuon.models.registry import get_model_spec

        for name, flavor in models:
            spec = get_model_spec(name, flavor, attn_backend="sdpa")
            shapes += [matrix.shape for matrix in model_matrices(spec)]
    return list(dict.fromkeys(shapes))


@torch.no_grad()
def main() -> None:
    o = tyro.cli(Options)
    try:
        shapes = every_shape(o.shapes)
        name = ("float16" if o.device == "cuda" else "float32") if o.dtype == "auto" else o.dtype
        if name not in DTYPES:
            raise ConfigError(f"--dtype: expected one of {', '.join(DTYPES)}, got {o.dtype}")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    dtype, device = DTYPES[name], torch.device(o.device)
    rate = matmul_rate(dtype, device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
    about = {
        "device": where or platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "rounds": o.rounds,
        "product_tflops": rate / 1e12,
    }
    print(json.dumps(about))
    print("ratios: the other's time over ours, median within a round (distance of quartiles)")
    entries = []
    for shape in shapes:
        torch.manual_seed(0)
        matrix = torch.randn(shape, device=device)
        entries.append(row(shape, contest(candidates(dtype), matrix, o.rounds), rate, dtype))
        print(shown(entries[-1]), flush=True)
    if o.experts:
        entries.append(together(o.experts, shapes[0], dtype, o))
        print(shown(entries[-1]))
    if o.json:
        Path(o.json).write_text(json.dumps({"about": about, "shapes": entries}, indent=1) + "\n")


if __name__ == "__main__":
    main()
