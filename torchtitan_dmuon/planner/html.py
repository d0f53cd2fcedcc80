"""The report of a plan: one HTML file that needs nothing else.

Everything is said in HTML and CSS, so the page is complete without JavaScript and without a
network; its own policy forbids both loading and sending. Nothing is told by colour alone: tiles
carry text and a line for size, the parts of the memory stack a pattern and a letter.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path

from .markup import (
    Level,
    Markup,
    Share,
    bars,
    count,
    details,
    duration,
    gib,
    join,
    percent,
    ratio,
    several,
    size,
    table,
    tag,
)
from .owner_map import owner_map
from .plan import Plan, Rail, RankPlace

# The page may run what it carries, and reach nothing.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
# Rails that a visible table lists; more are drawn as bars, with the table folded.
MAX_RAILS = 16
MASTER_BYTES = 4

MEMORY_PARTS = (
    ("parameters", "Parameters that computation reads"),
    ("masters", "FP32 masters"),
    ("momentum", "Optimizer state"),
    ("leader_copies", "Leader copies"),
    ("gradients", "Gradients"),
    ("pool", "Symmetric pool beyond the parts above"),
    ("activations", "Activations, loss included"),
    ("runtime", "CUDA context, workspaces, buffers, fragmentation"),
)


def write(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the report; readers see the old file or the whole new one.

    Args:
        plan: Plan.
        path: File, or a link to one. Its folder must exist.

    Raises:
        OSError: If the file cannot be written; nothing is left behind.
    """
    target = Path(path).resolve()  # a link stays one
    page = render(plan)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(page)
            # mkstemp makes it private; a report has the mode of any new file.
            umask = os.umask(0)
            os.umask(umask)
            os.fchmod(file.fileno(), 0o666 & ~umask)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def render(plan: Plan) -> str:
    """Return the report as a whole HTML page, for a plan of any size and mode."""
    model = plan.model
    title = f"Plan: {model.name} {model.flavor} on {_machines(plan)}"
    sections = (
        ("advice", "What to change", _advice(plan)),
        ("memory", "Memory of the heaviest GPU (GiB)", _memory(plan)),
        (
            "owners",
            "Owner map (layers by columns)",
            owner_map(plan) if plan.layers else _no_owners(plan),
        ),
        ("balance", "Balance over ranks (time and bytes)", _balance(plan)),
        ("rails", "Rail loads (bytes published in a step)", _rails(plan)),
        ("traffic", "Traffic of one GPU (bytes sent in a step)", _traffic(plan)),
        ("assumptions", "Assumptions", _bullets(plan.assumptions, "None.")),
    )
    links = [("summary", "Summary"), *((key, name.split(" (")[0]) for key, name, _ in sections)]
    body = join(
        (
            tag(
                "header",
                tag("h1", title),
                tag("p", _job(plan), cls="muted"),
                tag("nav", *(tag("a", x, href=f"#{k}") for k, x in links), aria_label="Sections"),
            ),
            tag(
                "main",
                tag("section", tag("h2", "Summary", cls="hidden"), *_summary(plan), id="summary"),
                *(tag("section", tag("h2", name), part, id=key) for key, name, part in sections),
            ),
            Markup('<div id="tip" role="tooltip" hidden></div>'),
            tag("script", Markup(_resource("report.js"))),
        )
    )
    head = join(
        (
            Markup('<meta charset="utf-8">\n'),
            Markup(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'),
            Markup('<meta name="viewport" content="width=device-width, initial-scale=1">\n'),
            Markup('<link rel="icon" href="data:,">\n'),
            tag("title", title),
            tag("style", Markup(_resource("report.css"))),
        )
    )
    page = f"<head>\n{head}\n</head>\n<body>\n{body}\n</body>"
    return f'<!doctype html>\n<html lang="en">\n{page}\n</html>\n'


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _machines(plan: Plan) -> str:
    nodes, gpus = plan.cluster.nodes, plan.cluster.gpus_per_node
    return f"{count(nodes * gpus)} GPUs ({several(nodes, 'node')} of {gpus})"


def _job(plan: Plan) -> str:
    line = f"line {plan.line}, " if plan.line else ""
    return (
        f"{plan.config}: {line}mode {plan.mode} over {plan.communication}, {plan.sharding}, "
        f"mesh {plan.cluster.rows} x {plan.cluster.columns}, {plan.algorithm}; "
        f"{plan.cluster.device_name}; {count(plan.tokens_per_gpu)} tokens per GPU and micro-batch "
        f"in sequences of {count(plan.seq_len)}, recomputation {plan.recompute}."
    )


def _summary(plan: Plan) -> Iterator[Markup]:
    memory = (
        f"peak {gib(plan.memory_gib.peak)} of {gib(plan.cluster.memory_gib)} on the heaviest GPU"
    )
    if plan.fits:
        yield tag("p", f"✓ Fits: {memory}, {gib(plan.headroom_gib)} to spare.", cls="verdict")
    else:
        over = f"✕ Does not fit: {memory}, {gib(-plan.headroom_gib)} too much."
        yield tag("p", over, cls="verdict over")
    facts = [*_owner_facts(plan), *_model_facts(plan)]
    yield tag("dl", *(_fact(*x) for x in facts), cls="facts")
    yield tag("p", f"Times of shapes: {plan.ns_time.source}.", cls="note")


def _owner_facts(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Yield title, value and note of what the assignment decides; nothing without owners."""
    time, balance = plan.ns_time, plan.bytes
    if time.busiest_seconds > 0:
        yield (
            "Update time of a step, busiest rank",
            duration(time.busiest_seconds),
            f"{ratio(time.busiest_over_mean)} of the mean, {duration(time.mean_seconds)}; no "
            f"assignment is below {duration(time.bound_seconds)}",
        )
    if not plan.layers:
        return
    cap = "no cap" if balance.cap is None else f"cap {1 + balance.cap:g}"
    if balance.over_cap:
        cap += f", passed by {several(balance.over_cap, 'unit')}"
    yield "Owned bytes, heaviest rank over mean", ratio(balance.heaviest_over_mean), cap
    yield (
        "Worst layer, heaviest owner over largest unit",
        ratio(plan.worst_layer_root_ratio),
        plan.worst_layer,
    )
    if plan.cluster.rows > 1:
        yield (
            "Published bytes, heaviest rail over mean",
            ratio(plan.columns.publish_max_over_mean),
            f"update time of columns: {ratio(plan.columns.time_max_over_mean)}",
        )
    ranks = several(plan.cluster.nodes * plan.cluster.gpus_per_node, "rank")
    yield "Owners", count(plan.owners), f"of {ranks}; assignment {plan.assignment}"


def _model_facts(plan: Plan) -> Iterator[tuple[str, str, str]]:
    yield (
        "Matrices",
        count(plan.matrices),
        f"{several(plan.units, 'unit')} in {several(plan.groups, 'group')}, up to "
        f"{count(plan.units_per_layer)} in a layer",
    )
    yield (
        "Parameters",
        f"{plan.model.parameters / 1e9:.3g} B",
        f"{count(plan.model.parameters)}; owned {count(plan.model.owned_elements)}, in "
        f"matrices {count(plan.model.matrix_elements)}; {several(plan.model.layers, 'layer')}",
    )
    yield (
        "Sent by one GPU in a step, between nodes",
        size(plan.traffic.across),
        f"inside the node {size(plan.traffic.inside)}",
    )


def _fact(name: str, value: str, note: str) -> Markup:
    return tag("div", tag("dt", name), tag("dd", value, cls="value"), tag("dd", note, cls="note"))


def _bullets(lines: Sequence[str], none: str) -> Markup:
    return tag("ul", *(tag("li", x) for x in lines)) if lines else tag("p", none)


def _advice(plan: Plan) -> Markup:
    return _bullets(plan.advice, "Nothing: it fits." if plan.fits else "No advice is known.")


def _memory(plan: Plan) -> Markup:
    limit = plan.cluster.memory_gib
    parts = [(name, float(getattr(plan.memory_gib, key))) for key, name in MEMORY_PARTS]
    peak = plan.memory_gib.peak
    # Room for what does not fit, and for the line at the limit.
    scale = max(peak, limit) * 1.02
    marks, rows, start = [], [], 0.0
    for index, (name, value) in enumerate(parts):
        letter = chr(ord("A") + index)
        share = f"{100 * value / limit:.1f}%"
        if value > 0:
            says = f"{letter}, {name}: {gib(value)}, {share} of the GPU's memory"
            style = f"--l:{percent(start, scale)};--t:{percent(value, scale)}"
            mark = tag("b", letter)
            marks.append(
                tag("span", mark, cls=f"part p{index}", role="img", aria_label=says, style=style)
            )
        swatch = tag("span", tag("b", letter), cls=f"swatch p{index}", aria_hidden="true")
        rows.append((join((swatch, name)), Share(f"{value:.2f}", value), share))
        start += value
    text = f"GPU memory {gib(limit)}"
    # The label stands on the side of the line that has more room.
    side = "limit" if limit > scale / 2 else "limit right"
    marks.append(tag("span", tag("span", text), cls=side, style=f"--l:{percent(limit, scale)}"))
    if peak > limit:
        style = f"--l:{percent(limit, scale)};--t:{percent(peak - limit, scale)}"
        says = tag("span", f"{gib(peak - limit)} too much")
        marks.append(tag("span", says, cls="excess", style=style))
    label = f"Memory of the heaviest GPU when most is in use, {gib(peak)}, against {gib(limit)}"
    stack = tag("div", *marks, cls="stack", role="group", aria_label=label, data_roving=True)
    parts_table = table(
        f"{label}.",
        ("Part", "GiB", "Share of the GPU"),
        rows,
        foot=("Peak", f"{peak:.2f}", f"{100 * peak / limit:.1f}%"),
    )
    return join((stack, tag("div", parts_table, _per_rank(plan), cls="pair")))


def _per_rank(plan: Plan) -> Markup:
    ratios = (
        ("Optimizer state", plan.state_bytes),
        ("FP32 parameters that the optimizer updates", plan.master_bytes),
        ("Reduced gradients of what a rank owns", plan.owner_window_bytes),
        ("Leader copies", plan.leader_copy_bytes),
        ("Reduced gradients, all", plan.gradient_bytes),
    )
    return table(
        "Per rank: the busiest and the mean.",
        ("What", "Busiest", "Mean", "Busiest in bytes"),
        [(name, size(x.busiest), size(x.mean), count(round(x.busiest))) for name, x in ratios],
    )


def _no_owners(plan: Plan) -> Markup:
    return tag("p", f"Nothing to show: in mode {plan.mode} no rank owns whole matrices.")


def _balance(plan: Plan) -> Markup:
    owners = [r for r in plan.ranks if r.units]
    if not owners:
        return _no_owners(plan)
    idle = len(plan.ranks) - len(owners)
    time, cap = plan.ns_time, plan.bytes.cap
    mean = MASTER_BYTES * sum(r.elements for r in plan.ranks) / len(plan.ranks)
    byte_levels = [Level(mean, f"mean {size(mean)}")]
    if cap is not None:
        limit = mean * (1 + cap)
        byte_levels.append(Level(limit, f"cap {size(limit)}", limit=True))
    charts = tag(
        "div",
        _profile(
            "Update time of a step per rank (seconds)",
            owners,
            lambda r: r.seconds,
            duration,
            (
                Level(time.mean_seconds, f"mean {duration(time.mean_seconds)}"),
                Level(time.bound_seconds, f"bound {duration(time.bound_seconds)}", limit=True),
            ),
        ),
        _profile(
            "FP32 masters of owned matrices per rank (bytes)",
            owners,
            lambda r: float(MASTER_BYTES * r.elements),
            size,
            byte_levels,
        ),
        cls="charts",
    )
    note = (
        "Ranks that own something, the largest first; means are over all "
        f"{several(len(plan.ranks), 'rank')}."
    )
    if idle:
        note += f" {several(idle, 'rank')} {'owns' if idle == 1 else 'own'} nothing."
    return join((tag("p", note), charts, _ranks(plan)))


def _profile(
    label: str,
    ranks: Sequence[RankPlace],
    value: Callable[[RankPlace], float],
    text: Callable[[float], str],
    levels: Sequence[Level],
) -> Markup:
    found = sorted(ranks, key=value, reverse=True)
    values = [
        (
            value(r),
            f"rank {r.rank}: {text(value(r))}; {several(r.units, 'unit')}, "
            f"{several(r.matrices, 'matrix')}",
        )
        for r in found
    ]
    first, last = (f"rank {r.rank}: {text(value(r))}" for r in (found[0], found[-1]))
    return bars(label, values, text=text, noun="rank", ends=(first, last), levels=levels)


def _ranks(plan: Plan) -> Markup:
    head = ("Rank", "Units", "Matrices", "Update time", "Elements of matrices", "Optimizer state")
    rows = [
        (r.rank, r.units, r.matrices, duration(r.seconds), count(r.elements), size(r.state_bytes))
        for r in plan.ranks
    ]
    what = f"Table of {several(len(rows), 'rank')}"
    return details(what, table(f"{what}: what each owns.", head, rows))


def _rails(plan: Plan) -> Markup:
    if not plan.layers:
        return _no_owners(plan)
    if plan.cluster.rows == 1 or not plan.rails:
        return tag("p", "The mesh has one row: no node needs what another node's owners publish.")
    columns = plan.columns
    says = (
        "What the owners of a column publish in a step, over that column's cross-node links. "
        f"Heaviest rail over the mean: {ratio(columns.publish_max_over_mean)} in bytes; busiest "
        f"column over the mean: {ratio(columns.time_max_over_mean)} in update time."
    )
    listed = _rail_table(plan.rails)
    if len(plan.rails) <= MAX_RAILS:
        return join((tag("p", says), listed))
    values = [
        (float(r.bytes), f"column {r.column}: {size(r.bytes)}, {several(r.tasks, 'task')}")
        for r in plan.rails
    ]
    mean = sum(r.bytes for r in plan.rails) / len(plan.rails)
    chart = bars(
        "Published in a step per rail (bytes)",
        values,
        text=size,
        noun="rail",
        ends=(f"column {plan.rails[0].column}", f"column {plan.rails[-1].column}"),
        levels=[Level(mean, f"mean {size(mean)}")],
    )
    return join((tag("p", says), chart, details(f"Table of {len(plan.rails)} rails", listed)))


def _rail_table(rails: Sequence[Rail]) -> Markup:
    rows = [
        (
            f"column {r.column}",
            Share(size(r.bytes), r.bytes),
            count(r.bytes),
            count(r.tasks),
            count(r.matrices),
            size(r.largest_bytes),
            Share(duration(r.seconds), r.seconds),
        )
        for r in rails
    ]
    head = ("Rail", "Published", "In bytes", "Tasks", "Matrices", "Largest task", "Update time")
    return table("Rails: published in a step; tasks are matrices, norms and biases.", head, rows)


def _traffic(plan: Plan) -> Markup:
    t = plan.traffic
    kinds = (
        ("Gather: parameters of layers", t.gather_inside, t.gather_across),
        ("Reduce: gradients of layers", t.reduce_inside, t.reduce_across),
        ("Publish: new weights to leaders", 0.0, t.publish_across),
        ("Outside the layers: embeddings, output head", t.rest_inside, t.rest_across),
        ("Optimizer step itself", t.optimizer_inside, t.optimizer_across),
    )
    rows = [
        (name, Share(size(inside), inside), Share(size(across), across))
        for name, inside, across in kinds
    ]
    return table(
        "Bytes that one GPU sends in a step on average, without protocol overhead.",
        ("What", "Inside the node", "Between nodes"),
        rows,
        foot=("Sum", size(t.inside), size(t.across)),
    )
