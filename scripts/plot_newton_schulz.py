#!/usr/bin/env python3
"""Draw singular values before and after Newton-Schulz: docs/images/newton_schulz.png.

Needs matplotlib (extra `docs`). Left: what exact arithmetic does to one singular value. Right:
those of the result, largest first, for a matrix whose own fall from 1 to 1e-4.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from torchtitan_dmuon.optim.newton_schulz import BAND, BAND_FLOOR, newton_schulz, per_step

try:
    import matplotlib.pyplot as plt
except ImportError:
    raise SystemExit("error: needs matplotlib: scripts/setup_env.py --extra docs") from None

ROWS, COLUMNS, SMALLEST = 96, 128, 1e-4
RUNS = (
    ("bfloat16, restart at 2 alone", torch.bfloat16, (2,), "v"),
    ("bfloat16, restarts at 2 and 4", torch.bfloat16, (2, 4), "^"),
    ("float16, restart at 2", torch.float16, (2,), "s"),
    ("float32, restart at 2", torch.float32, (2,), "o"),
)


@dataclass
class Options:
    """Draw singular values before and after Newton-Schulz."""

    output: Path = Path(__file__).resolve().parent.parent / "docs/images/newton_schulz.png"
    """Where to."""


def exact(values: torch.Tensor, coefficients: str) -> torch.Tensor:
    """Return what the iteration makes of singular values in exact arithmetic."""
    for a, b, c in per_step(coefficients, 5):
        values = values * (a + b * values**2 + c * values**4)
    return values


def matrix() -> torch.Tensor:
    """Return a matrix in float64 with singular values from 1 down to SMALLEST."""
    torch.manual_seed(0)
    u, _ = torch.linalg.qr(torch.randn(ROWS, ROWS, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(COLUMNS, ROWS, dtype=torch.float64))
    values = torch.logspace(0, torch.tensor(SMALLEST).log10().item(), ROWS, dtype=torch.float64)
    return u @ torch.diag(values) @ v.T


def draw_exact(axes: plt.Axes) -> None:
    values = torch.logspace(-4, 0, 2000, dtype=torch.float64)
    axes.axhspan(*BAND, color="0.88", label=f"{BAND[0]} to {BAND[1]}")
    axes.axvline(BAND_FLOOR, color="0.6", linewidth=0.8)
    axes.plot(values, exact(values, "polar_express"), "k-", label="Polar Express, five steps")
    axes.plot(values, exact(values, "quintic"), "k:", label="quintic (torch.optim.Muon)")
    axes.set(title="exact arithmetic", ylabel="singular value after", ylim=(0, 1.3))
    axes.set(xscale="log", xlabel="singular value before, over the norm")
    axes.legend(fontsize=7, loc="lower right")


def draw_measured(axes: plt.Axes) -> None:
    start = matrix()
    axes.axhspan(*BAND, color="0.88")
    for shade, (label, dtype, restarts, marker) in enumerate(RUNS):
        result = newton_schulz(start, dtype=dtype, method="gram", restarts=restarts)
        values = torch.linalg.svdvals(result.double())[:48]
        axes.plot(values, marker, color=str(0.18 * shade), mfc="none", ms=4, label=label)
    axes.set(title=f"{ROWS} x {COLUMNS}, Gram", ylabel="singular value after", ylim=(0.7, 1.9))
    axes.set_xlabel("singular values of the result, largest first")
    axes.legend(fontsize=7, loc="upper right")


def main() -> None:
    options = tyro.cli(Options)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    draw_exact(left)
    draw_measured(right)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output, dpi=130)
    print(options.output)


if __name__ == "__main__":
    main()
