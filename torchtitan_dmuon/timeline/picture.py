"""Draws the timeline of a step (the paper's figure 3) above a bar per rank (its figure 10).

A picture is a list of boxes, texts and lines; SVG and HTML are written from it as they are, PNG
with matplotlib.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_dmuon.timeline.breakdown import KINDS, PHASES, Breakdown

FORMATS = (".svg", ".html", ".png")

COLOURS = {
    "forward": "#4c78a8",
    "backward": "#1f3a5f",
    "optimizer": "#59a14f",
    "gather": "#f2b134",
    "reduce": "#e4572e",
    "publish": "#9467bd",
    "other": "#8c8c8c",
    "publish wait": "#d8b4fe",
    "idle": "#e6e6e6",
}

_LEFT, _RIGHT, _WIDTH = 90.0, 90.0, 1100.0
_ROW = 26.0
_SPACE = _WIDTH - _LEFT - _RIGHT
_SMALLEST = 0.3
"""Pixels; what is nearer to each other becomes one box."""


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle; `title` is shown under the pointer."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    title: str


@dataclass(frozen=True, slots=True)
class Text:
    """A line of text at its baseline; anchor: start, middle or end."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    size: float = 12.0


@dataclass(slots=True)
class Picture:
    """What is drawn: pixels, y downwards.

    Attributes:
        height: Of the whole; the width is fixed.
        boxes: Rectangles, later ones on top.
        texts: Labels.
        lines: Thin grey lines (x0, y0, x1, y1), below the boxes.
    """

    height: float = 0.0
    boxes: list[Box] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)
    lines: list[tuple[float, float, float, float]] = field(default_factory=list)


def draw(shown: Breakdown, figures: Sequence[dict[str, Any]]) -> Picture:
    """Return the picture of a step.

    Args:
        shown: The rank whose timeline is drawn.
        figures: `Breakdown.as_dict` of every rank, in their order.
    """
    picture = Picture()
    total = (shown.end - shown.start) / 1e3
    heading = f"step {shown.step}, rank {shown.rank} ({shown.device}): {total:.1f} ms"
    picture.texts.append(Text(_LEFT, 22, heading, size=15))
    hint = "communication in the row compute is exposed: nothing else ran"
    picture.texts.append(Text(_LEFT + _SPACE, 22, hint, "end", 11))
    y = _draw_rows(picture, shown, 36)
    y = _draw_legend(picture, y + 20)
    picture.texts.append(Text(_LEFT, y + 24, "where the time went, by rank", size=15))
    picture.height = _draw_ranks(picture, figures, y + 38) + 12
    return picture


def _draw_rows(picture: Picture, shown: Breakdown, top: float) -> float:
    """Draw one row for what computes and one per kind of communication. Returns where it ends."""
    scale = _SPACE / max(shown.end - shown.start, 1e-3)
    rows = ["compute", *(kind for kind in KINDS if shown.communication[kind])]
    bottom = top + _ROW * len(rows)
    _draw_axis(picture, (shown.end - shown.start) / 1e3, scale * 1e3, top, bottom)
    for i, row in enumerate(rows):
        y = top + _ROW * i
        picture.texts.append(Text(_LEFT - 8, y + 17, row, "end"))
        pieces = _compute_row(shown) if i == 0 else _bars(shown, row)
        for start, end, name, title in _merged(pieces, _SMALLEST / scale):
            x = _LEFT + (start - shown.start) * scale
            width = max((end - start) * scale, _SMALLEST)
            took = f"{title}: {(end - start) / 1e3:.3f} ms"
            picture.boxes.append(Box(x, y + 3, width, _ROW - 6, COLOURS[name], took))
    return bottom + 18


_Piece = tuple[float, float, str, str]


def _compute_row(shown: Breakdown) -> Iterator[_Piece]:
    sets = [(name, name, shown.phases[name]) for name in PHASES]
    sets += [(kind, f"waits: {kind}", shown.exposed[kind]) for kind in KINDS]
    sets += [("publish wait", "publish wait", shown.publish_wait), ("idle", "idle", shown.idle)]
    for name, title, times in sets:
        for start, end in times:
            yield start, end, name, title


def _bars(shown: Breakdown, kind: str) -> Iterator[_Piece]:
    for bar in shown.bars:
        if bar.kind == kind:
            yield bar.start, bar.end, kind, bar.label


def _merged(pieces: Iterable[_Piece], nearest: float) -> Iterator[_Piece]:
    """Yield pieces, neighbours of one name joined where nobody could tell them apart."""
    last: _Piece | None = None
    for piece in sorted(pieces):
        short = last and max(last[1] - last[0], piece[1] - piece[0]) < 2 * nearest
        near = last and piece[2] == last[2] and piece[0] - last[1] < nearest
        if last and near and (short or piece[3] == last[3]):
            last = (last[0], max(last[1], piece[1]), last[2], last[3])
            continue
        if last:
            yield last
        last = piece
    if last:
        yield last


def _draw_axis(picture: Picture, span: float, scale: float, top: float, bottom: float) -> None:
    """Draw lines at round numbers of milliseconds; `scale` is pixels per millisecond."""
    step = 10.0 ** math.floor(math.log10(max(span, 1e-6) / 4))
    step *= next(f for f in (1, 2, 5, 10) if span / (step * f) <= 10)
    for i in range(int(span / step) + 1):
        x = _LEFT + i * step * scale
        picture.lines.append((x, top, x, bottom))
        picture.texts.append(Text(x, bottom + 14, f"{i * step:g}", "middle", 11))
    picture.texts.append(Text(_LEFT + _SPACE + 8, bottom + 14, "ms", size=11))


def _draw_legend(picture: Picture, top: float) -> float:
    x = _LEFT
    for name, colour in COLOURS.items():
        text = f"{name} (communication)" if name == "other" else name
        picture.boxes.append(Box(x, top - 10, 12, 12, colour, text))
        picture.texts.append(Text(x + 17, top, text))
        x += 34 + 6.6 * len(text)
    return top + 8


def _draw_ranks(picture: Picture, figures: Sequence[dict[str, Any]], top: float) -> float:
    """Draw a stacked bar for each rank. Returns where they end."""
    row = _ROW if len(figures) <= 16 else 14.0
    longest = max(rank["step_ms"] for rank in figures)
    scale = _SPACE / max(longest, 1e-6)
    bottom = top + row * len(figures)
    _draw_axis(picture, longest, scale, top, bottom)
    for i, rank in enumerate(figures):
        y, x = top + row * i, _LEFT
        picture.texts.append(Text(_LEFT - 8, y + row - 4, f"rank {rank['rank']}", "end", 11))
        parts = [(name, name, rank[f"{name}_ms"]) for name in PHASES]
        parts += [(kind, f"exposed {kind}", rank["exposed"][kind]) for kind in KINDS]
        parts += [("publish wait", "publish wait", rank["publish_wait_ms"])]
        parts += [("idle", "idle", rank["idle_ms"])]
        for name, title, ms in parts:
            share = 100 * ms / max(rank["step_ms"], 1e-6)
            says = f"rank {rank['rank']}, {title}: {ms:.3f} ms, {share:.1f} %"
            picture.boxes.append(Box(x, y + 1, ms * scale, row - 2, COLOURS[name], says))
            x += ms * scale
        picture.texts.append(Text(x + 6, y + row - 4, f"{rank['step_ms']:.1f} ms", size=11))
    return bottom + 18


# -- files -----------------------------------------------------------------------------------


def to_svg(picture: Picture) -> str:
    """Return the picture as an SVG element."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {picture.height:g}" '
        f'width="{_WIDTH:g}" height="{picture.height:g}" font-family="sans-serif">',
        f'<rect width="{_WIDTH:g}" height="{picture.height:g}" fill="#ffffff"/>',
    ]
    for x0, y0, x1, y1 in picture.lines:
        ends = f'x1="{x0:.2f}" y1="{y0:.2f}" x2="{x1:.2f}" y2="{y1:.2f}"'
        parts.append(f'<line {ends} stroke="#d0d0d0"/>')
    for box in picture.boxes:
        parts.append(
            f'<rect x="{box.x:.2f}" y="{box.y:.2f}" width="{box.width:.2f}" '
            f'height="{box.height:.2f}" fill="{box.colour}"><title>{html.escape(box.title)}'
            "</title></rect>"
        )
    for text in picture.texts:
        parts.append(
            f'<text x="{text.x:.2f}" y="{text.y:.2f}" font-size="{text.size:g}" '
            f'text-anchor="{text.anchor}">{html.escape(text.text)}</text>'
        )
    return "\n".join([*parts, "</svg>"])


def write(picture: Picture, path: Path, report: str) -> None:
    """Write a picture; the suffix says how.

    Args:
        picture: What to draw.
        path: Ends in one of `FORMATS`.
        report: Figures as text, which HTML shows below the picture.

    Raises:
        OSError: it cannot be written.
        ImportError: PNG needs matplotlib, which is not installed.
    """
    if path.suffix == ".png":
        _write_png(picture, path)
        return
    svg = to_svg(picture)
    if path.suffix == ".html":
        svg = (
            '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>dmuon timeline</title>\n'
            f"<body>\n{svg}\n<pre>\n{html.escape(report)}\n</pre>\n</body></html>"
        )
    path.write_text(svg + "\n", encoding="utf-8")


def _write_png(picture: Picture, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    dots = 100.0  # pixels of the picture per inch; twice as many are written
    figure = Figure(figsize=(_WIDTH / dots, picture.height / dots))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, _WIDTH)
    axes.set_ylim(picture.height, 0)
    axes.set_axis_off()
    for x0, y0, x1, y1 in picture.lines:
        axes.plot((x0, x1), (y0, y1), color="#d0d0d0", linewidth=0.7, zorder=1)
    for box in picture.boxes:
        axes.add_patch(
            Rectangle((box.x, box.y), box.width, box.height, color=box.colour, linewidth=0)
        ).set_zorder(2)
    anchors = {"start": "left", "middle": "center", "end": "right"}
    for text in picture.texts:
        axes.text(text.x, text.y, text.text, fontsize=text.size * 0.7, ha=anchors[text.anchor])
    figure.savefig(path, dpi=2 * dots)
