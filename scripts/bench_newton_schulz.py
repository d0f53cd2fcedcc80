#!/usr/bin/env python3
"""How long Newton-Schulz takes, shape by shape, against torch.optim.Muon's and the reference.

How it is measured: torchtitan_dmuon/bench/newton_schulz.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import tyro

from torchtitan_dmuon.bench.newton_schulz import (
    DTYPES,
    Candidate,
    Shape,
    compared,
    contest,
    matmul_rate,
    model_shapes,
    ours_in,
    reference,
    row,
    spread,
    torch_in,
)
from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.costs import parse_shapes
from torchtitan_dmuon.optim.newton_schulz import uses_gram
from torchtitan_dmuon.optim.symmetric_matmul.identity import cpu_model


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


def candidates(dtype: torch.dtype, device: torch.device) -> dict[str, Candidate]:
    """Return what is compared, ours first."""
    others: dict[str, Candidate] = {}
    # The reference's float16 products have no fast form on CPUs.
    if dtype == torch.float16 and device.type == "cuda":
        others, missing = reference(device, compiled=True)
        for name, reason in missing.items():
            print(f"{name} is left out: {reason}", file=sys.stderr)
    return {
        "ours": ours_in(dtype),
        "ours, standard": ours_in(dtype, method="standard"),
        "torch.optim.Muon": torch_in(dtype),
        **others,
    }


def succeeded(
    result: tuple[dict[str, list[float]], dict[str, str]],
) -> dict[str, list[float]]:
    """Return the times of a contest. Raises SystemExit if ours failed; contest said why."""
    times, failed = result
    if "ours" in failed:
        raise SystemExit(1)
    return times


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


def together(count: int, shape: Shape, dtype: torch.dtype, o: Options) -> dict[str, Any]:
    """Compare a batch in one call with its matrices one by one."""
    torch.manual_seed(0)
    batch = torch.randn(count, *shape, device=o.device)
    run = ours_in(dtype)
    runs: dict[str, Candidate] = {
        "ours": run,
        "one by one": lambda matrices: torch.stack([run(m) for m in matrices.unbind()]),
    }
    times = succeeded(contest(runs, batch, o.rounds))
    return {
        "rows": shape[0],
        "columns": shape[1],
        "together": count,
        "dtype": str(dtype).removeprefix("torch."),
        "method": "gram" if uses_gram(*shape) else "standard",
        "seconds": spread(times["ours"])[0],
        **compared(times),
    }


def every_shape(texts: Sequence[str]) -> list[Shape]:
    """Return the distinct shapes that options name. Raises ConfigError."""
    shapes, models = parse_shapes(texts)
    return list(dict.fromkeys(shapes + (model_shapes(models) if models else [])))


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
    where = torch.cuda.get_device_name() if device.type == "cuda" else cpu_model()
    about = {
        "device": where,
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
        times = succeeded(contest(candidates(dtype, device), matrix, o.rounds))
        entries.append(row(shape, times, rate, dtype))
        print(shown(entries[-1]), flush=True)
    if o.experts:
        entries.append(together(o.experts, shapes[0], dtype, o))
        print(shown(entries[-1]))
    if o.json:
        Path(o.json).write_text(json.dumps({"about": about, "shapes": entries}, indent=1) + "\n")


if __name__ == "__main__":
    main()
