"""Plans of made-up numbers, for tests of how a plan is shown."""

from __future__ import annotations

from typing import Any

from torchtitan_dmuon.planner.plan import (
    ByteBalance,
    Cluster,
    Columns,
    LayerPlace,
    Memory,
    ModelFacts,
    NsTime,
    Plan,
    Rail,
    RankPlace,
    Ratio,
    Traffic,
    UnitPlace,
)

DENSE = ("attention.wq", "attention.wk", "attention.wv", "attention.wo") + tuple(
    f"feed_forward.w{i}" for i in (1, 2, 3)
)


def place_units(
    layers: int, kinds: tuple[str, ...], rows: int, columns: int
) -> tuple[LayerPlace, ...]:
    """Place units on ranks: columns in turn, rows by a stride."""
    places, n = [], 0
    for layer in range(layers):
        units = []
        for kind in kinds:
            column, row = n % columns, (n * 7 // columns) % rows
            units.append(
                UnitPlace(
                    name=f"layers.{layer}.{kind}.weight",
                    matrices=1 + (n % 5 == 0),
                    parameters=n % 3,
                    elements=1000 * (1 + n % 11),
                    seconds=1e-5 * (1 + n % 11),
                    rank=row * columns + column,
                    row=row,
                    column=column,
                )
            )
            n += 1
        places.append(LayerPlace(name=f"layers.{layer}", units=tuple(units)))
    return tuple(places)


def ranks_of(layers: tuple[LayerPlace, ...], ranks: int) -> tuple[RankPlace, ...]:
    """Sum up what each rank owns."""
    owned: list[list[UnitPlace]] = [[] for _ in range(ranks)]
    for layer in layers:
        for unit in layer.units:
            owned[unit.rank].append(unit)
    return tuple(
        RankPlace(
            rank=rank,
            units=len(units),
            matrices=sum(u.matrices for u in units),
            seconds=sum(u.seconds for u in units),
            elements=sum(u.elements for u in units),
            state_bytes=4 * sum(u.elements for u in units),
        )
        for rank, units in enumerate(owned)
    )


def rails_of(layers: tuple[LayerPlace, ...], columns: int) -> tuple[Rail, ...]:
    """Sum up what each column publishes."""
    units = [u for layer in layers for u in layer.units]
    return tuple(
        Rail(
            column=column,
            tasks=sum(u.matrices + u.parameters for u in units if u.column == column),
            matrices=sum(u.matrices for u in units if u.column == column),
            bytes=sum(2 * u.elements for u in units if u.column == column),
            largest_bytes=max((2 * u.elements for u in units if u.column == column), default=0),
            seconds=sum(u.seconds for u in units if u.column == column),
        )
        for column in range(columns)
    )


def make_plan(
    *,
    nodes: int = 2,
    gpus: int = 4,
    mesh: tuple[int, int] | None = None,
    layers: int = 2,
    kinds: tuple[str, ...] = DENSE,
    **changes: Any,
) -> Plan:
    """Return a plan with owners on a mesh of rows and columns; `changes` replace its fields."""
    rows, columns = mesh or (nodes, gpus)
    places = place_units(layers, kinds, rows, columns)
    ranks = ranks_of(places, nodes * gpus)
    times = [r.seconds for r in ranks] or [0.0]
    mean = sum(times) / len(times)
    units = [u for layer in places for u in layer.units]
    parts = {
        "parameters": 11.25, "masters": 6.5, "momentum": 6.25, "leader_copies": 1.5,
        "gradients": 9.75, "pool": 0.0, "activations": 20.5, "runtime": 2.5,
    }  # fmt: skip
    fields: dict[str, Any] = {
        "config": "train_configs/example.toml",
        "line": "C",
        "mode": "owner",
        "communication": "c10d",
        "sharding": "hsdp_z3",
        "algorithm": "muon",
        "tokens_per_gpu": 4096,
        "seq_len": 2048,
        "recompute": "full",
        "assignment": "lpt",
        "model": ModelFacts(
            name="qwen2_5",
            flavor="example",
            parameters=1_543_714_304,
            owned_elements=1_310_336_000,
            matrix_elements=1_310_000_000,
            layers=layers,
        ),
        "cluster": Cluster(
            device="h100-80g",
            device_name="NVIDIA H100 80 GB",
            memory_gib=79.25,
            nodes=nodes,
            gpus_per_node=gpus,
            rows=rows,
            columns=columns,
        ),
        "matrices": sum(u.matrices for u in units),
        "units": len(units),
        "groups": layers,
        "units_per_layer": len(kinds),
        "owners": sum(r.units > 0 for r in ranks),
        "ns_time": NsTime(
            busiest_seconds=max(times),
            mean_seconds=mean,
            bound_seconds=max(mean, 1.1e-4),
            busiest_over_mean=max(times) / mean if mean else 1.0,
            source="a table of the H100",
        ),
        "bytes": ByteBalance(heaviest_over_mean=1.123, cap=0.25, over_cap=2),
        "worst_layer_root_ratio": 1.75,
        "worst_layer": "layers.1",
        "columns": Columns(publish_max_over_mean=1.031, time_max_over_mean=1.042),
        "rails": rails_of(places, columns),
        "state_bytes": Ratio(busiest=6_710_886_400, mean=5_000_000_000),
        "master_bytes": Ratio(busiest=6_979_321_856, mean=5_100_000_000),
        "owner_window_bytes": Ratio(busiest=400_000, mean=300_000),
        "leader_copy_bytes": Ratio(busiest=1_610_612_736, mean=1_500_000_000),
        "gradient_bytes": Ratio(busiest=900_000_000, mean=800_000_000),
        "pool_bytes": 0,
        "traffic": Traffic(
            gather_inside=3.2e9,
            gather_across=0.0,
            reduce_inside=3.4e9,
            reduce_across=5.1e8,
            publish_across=2.5e8,
            rest_inside=9e8,
            rest_across=1.1e8,
        ),
        "memory_gib": Memory(**parts, peak=sum(parts.values())),
        "fits": True,
        "headroom_gib": 79.25 - sum(parts.values()),
        "advice": (),
        "assumptions": ("Activations are counted from shapes.", "One micro-batch is in flight."),
        "layers": places,
        "ranks": ranks,
    }
    return Plan(**{**fields, **changes})


def small() -> Plan:
    """2 nodes of 4 GPUs, 2 layers of 7 units."""
    return make_plan()


def large() -> Plan:
    """512 nodes of 8 GPUs, 64 layers of 8 units: most ranks own nothing."""
    return make_plan(nodes=512, gpus=8, layers=64, kinds=(*DENSE, "attention.small"))


def experts(layers: int = 24) -> Plan:
    """32 nodes of 8 GPUs, 24 layers of 184 units."""
    names = (f"moe.experts.w{1 + i % 3}_EFD[{i // 3}]" for i in range(180))
    return make_plan(nodes=32, gpus=8, layers=layers, kinds=(*names, *DENSE[:4]))


def one_row(gpus: int = 256) -> Plan:
    """One row: FSDP over all GPUs, 28 layers of 7 units."""
    return make_plan(nodes=gpus // 8, gpus=8, mesh=(1, gpus), layers=28, sharding="fsdp_z3")


def without_owners() -> Plan:
    """Mode fsdp with AdamW: nobody owns whole matrices."""
    return make_plan(
        layers=0,
        line="A",
        mode="fsdp",
        algorithm="adamw",
        rails=(),
        ranks=(),
        worst_layer="",
        bytes=ByteBalance(heaviest_over_mean=1.0, cap=None, over_cap=0),
    )


def too_large() -> Plan:
    """Does not fit, and says what to change."""
    parts = {
        "parameters": 31.25, "masters": 16.5, "momentum": 16.25, "leader_copies": 1.5,
        "gradients": 19.75, "pool": 0.5, "activations": 20.5, "runtime": 2.5,
    }  # fmt: skip
    peak = sum(parts.values())
    return make_plan(
        memory_gib=Memory(**parts, peak=peak),
        fits=False,
        headroom_gib=79.25 - peak,
        advice=("Halve the micro-batch: saves 10.25 GiB.", "Use ZeRO-3: saves 12.00 GiB."),
    )


ALL = {
    "small": small,
    "large": large,
    "experts": experts,
    "one_row": one_row,
    "without_owners": without_owners,
    "too_large": too_large,
}
