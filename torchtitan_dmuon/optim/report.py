"""What the optimizer says of itself: routes at the start, counts and times of each step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

Route = Literal["matrix", "adamw", "frozen"]


@dataclass(frozen=True, slots=True)
class RouteRow:
    """Where one parameter goes.

    Attributes:
        name: Canonical name.
        shape: Full shape.
        route: "matrix" (Muon), "adamw" or "frozen".
        holder: Mesh ranks that own it ("0", "0,3"), or "sharded" or "local".
        matrices: Number of matrices in it.
        lr: Effective learning rates; of matrices, after the adjustment to their shape.
    """

    name: str
    shape: tuple[int, ...]
    route: Route
    holder: str
    matrices: int
    lr: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RoutingReport:
    """Which parameter takes which route. `str()` is a table, `as_dicts()` is data."""

    rows: tuple[RouteRow, ...]

    @property
    def num_matrices(self) -> int:
        """Matrices that one step orthogonalises."""
        return sum(row.matrices for row in self.rows if row.route == "matrix")

    def as_dicts(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.rows]

    def totals(self) -> str:
        """Return one line: parameters and elements by route."""
        parts = []
        for route in ("matrix", "adamw", "frozen"):
            rows = [row for row in self.rows if row.route == route]
            numel = sum(torch.Size(row.shape).numel() for row in rows)
            extra = f" ({self.num_matrices} matrices)" if route == "matrix" else ""
            parts.append(f"{route}: {len(rows)} parameters{extra}, {numel:,} elements")
        outside = [r.name for r in self.rows if r.route == "adamw" and len(r.shape) > 1]
        if outside:
            more = f" and {len(outside) - 6} more" if len(outside) > 6 else ""
            parts.append(
                f"weights of two and more dimensions on AdamW: {', '.join(outside[:6])}{more}"
            )
        return "; ".join(parts)

    def __str__(self) -> str:
        head = ("parameter", "shape", "route", "owner", "matrices", "lr")
        lines = [head] + [
            (
                row.name,
                "x".join(map(str, row.shape)) or "scalar",
                row.route,
                row.holder,
                str(row.matrices) if row.matrices else "",
                ", ".join(dict.fromkeys(f"{lr:.3g}" for lr in row.lr)),
            )
            for row in self.rows
        ]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        text = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([*(line.rstrip() for line in text), self.totals()])


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did on this rank.

    Attributes:
        orthogonalized: Matrices that went through Newton-Schulz here.
        skipped: Whether the step was left out because of non-finite gradients.
        nonfinite: Names of the parameters with such gradients, on any rank.
        seconds: Time by phase: reduce (waiting for gradients, agreeing on them), orthogonalize,
            elementwise, publish. On a GPU the device's time, known once the device is done.
    """

    orthogonalized: int = 0
    skipped: bool = False
    nonfinite: tuple[str, ...] = ()
    clock: PhaseClock | None = field(default=None, repr=False)

    @property
    def seconds(self) -> dict[str, float]:
        return self.clock.seconds() if self.clock else dict.fromkeys(PHASES, 0.0)


PHASES = ("reduce", "orthogonalize", "elementwise", "publish")


class PhaseClock:
    """Splits the time from its making to the last mark into phases, without gaps."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = [("", self._now())]

    def mark(self, phase: str) -> None:
        """The time since the last mark belongs to `phase`."""
        self._marks.append((phase, self._now()))

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase; waits for the device on a GPU."""
        if self._cuda:
            self._marks[-1][1].synchronize()
        result = dict.fromkeys(PHASES, 0.0)
        for (_, start), (phase, end) in _pairs(self._marks):
            result[phase] += start.elapsed_time(end) / 1e3 if self._cuda else end - start
        return result


def _pairs(marks: Sequence[tuple[str, Any]]) -> list[tuple[tuple[str, Any], tuple[str, Any]]]:
    return list(itertools.pairwise(marks))
