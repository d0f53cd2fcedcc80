"""A job and a cluster -> a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchtitan.config import TORCH_DTYPE_MAP

from torchtitan_dmuon.config.algorithm import rule_of
from torchtitan_dmuon.config.schema import JobConfig, Optimizer
from torchtitan_dmuon.optim.algorithms.muon import MuonRule
from torchtitan_dmuon.optim.matrix_optimizer import MatrixOptimizer
from torchtitan_dmuon.ownership import (
    Assignment,
    CostTable,
    assign,
    build_units,
    model_cost,
    summarize,
)
from torchtitan_dmuon.planner.advice import advise
from torchtitan_dmuon.planner.memory import (
    ADAM_BYTES,
    GRADIENT_SLOTS,
    MASTER_BYTES,
    Layout,
    Owned,
    gathered_bytes,
    peak_memory,
)
from torchtitan_dmuon.planner.model import Description, describe
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
from torchtitan_dmuon.planner.setting import Assigned, Setting, mesh_of
from torchtitan_dmuon.planner.shares import Shares
from torchtitan_dmuon.planner.traffic import Network, Volumes, traffic

WORK_BYTES = 16
"""Of an element, while its matrix is orthogonalized: the iterate and the product of the 16-bit
iteration, their float32 input and the float32 update."""


def make_plan(config: JobConfig, setting: Setting, *, path: str = "") -> Plan:
    """Plan a job.

    Args:
        config: The resolved job.
        setting: Where it is to run.
        path: Of the config file, for the report.

    Raises:
        ConfigError: the job and the cluster do not fit, or its model cannot be read.
        ValueError: a cost table that is not there, or is for something else.
        OSError: a cost table's file cannot be read.
    """
    return _Planner(config, setting, path).plan()


class _Planner:
    """One plan in the making; every method computes one part of it."""

    def __init__(self, config: JobConfig, setting: Setting, path: str = "") -> None:
        self.config, self.setting, self.path = config, setting, path
        self.mesh = mesh_of(config, setting.nodes * setting.gpus_per_node)
        self.model: Description = describe(config)
        p, training = config.parallelism, config.training
        self.mode = p.mode
        self.rule = _rule(config.optimizer)
        self.param_bytes = TORCH_DTYPE_MAP[training.mixed_precision_param].itemsize
        self.reduce_bytes = TORCH_DTYPE_MAP[training.mixed_precision_reduce].itemsize
        self.pooled = p.mode == "owner" and p.communication != "c10d"
        self.assumptions: list[str] = []
        parameters = [x for layer in self.model.layers for x in layer.parameters]
        self.matrices = [m for x in parameters for m in x.matrices]
        self.owned_numel = sum(x.numel for x in parameters)
        self.matrix_numel = sum(m.numel for m in self.matrices)
        self.assignment = self._assignment()
        self.summary = summarize(self.assignment, self.model.layers)
        half = config.optimizer.implementation == "fused_opt_states_bf16"
        self.shares = Shares(
            assignment=self.assignment,
            summary=self.summary,
            rule=self.rule,
            owners=self.mode == "owner",
            pooled=self.pooled,
            matrix_numel=self.matrix_numel,
            rider_numel=self.owned_numel - self.matrix_numel,
            rest_numel=sum(self.model.rest.values()),
            param_bytes=self.param_bytes,
            reduce_bytes=self.reduce_bytes,
            adam_bytes=ADAM_BYTES // 2 if half else ADAM_BYTES,
        )

    def plan(self) -> Plan:
        config, setting = self.config, self.setting
        training, summary = config.training, self.summary
        memory = self._memory()
        owners = self.mode == "owner"
        fits = memory.peak <= setting.device.memory_gib
        rule = "adamw" if self.rule is None else self.rule.label()
        units = self.assignment.units
        per_layer = [sum(1 for u in units if u.layer == i and u.matrices) for i in self._indices()]
        return Plan(
            config=self.path,
            line=config.line,
            mode=self.mode,
            communication=config.parallelism.communication if self.mode != "fsdp" else "c10d",
            sharding=self._sharding(),
            algorithm=rule,
            tokens_per_gpu=training.local_batch_size * training.seq_len,
            seq_len=training.seq_len,
            recompute=config.activation_checkpoint.mode,
            assignment=self._method() if owners else "none",
            model=ModelFacts(
                name=config.model.name,
                flavor=config.model.flavor,
                parameters=self.model.parameters,
                owned_elements=self.owned_numel,
                matrix_elements=self.matrix_numel,
                layers=len(self.model.layers),
            ),
            cluster=self._cluster(),
            matrices=summary.matrices if self.rule else 0,
            units=summary.units if owners else 0,
            groups=len(self.model.layers),
            units_per_layer=max(per_layer, default=0) if owners else 0,
            owners=summary.ranks - summary.idle_ranks if owners else 0,
            ns_time=self._ns_time(),
            bytes=ByteBalance(
                heaviest_over_mean=summary.heaviest_over_mean if owners else 1.0,
                cap=setting.byte_cap if owners else None,
                over_cap=len(summary.overruns) if owners else 0,
            ),
            worst_layer_root_ratio=summary.worst_layer_ratio if owners else 1.0,
            worst_layer=summary.worst_layer_name if owners else "",
            columns=self._columns(),
            rails=self._rails(),
            state_bytes=_ratio(self.shares.state()),
            master_bytes=_ratio(self.shares.masters()),
            owner_window_bytes=_ratio(self.shares.window(), owners_only=True),
            leader_copy_bytes=_ratio(self.shares.copies()),
            gradient_bytes=_ratio(self.shares.gradients()),
            pool_bytes=self._pool_bytes(),
            traffic=self._traffic(),
            memory_gib=memory,
            fits=fits,
            headroom_gib=setting.device.memory_gib - memory.peak,
            advice=self._advice(memory.peak),
            assumptions=tuple(self._assumptions()),
            layers=self._layers() if owners else (),
            ranks=self._ranks() if owners else (),
        )

    def _advice(self, peak: float) -> tuple[str, ...]:
        config, setting = self.config, self.setting

        def peak_of(changed: JobConfig) -> float:
            return _Planner(changed, setting)._memory().peak

        def on_twice_the_nodes() -> float:
            return _Planner(config, replace(setting, nodes=2 * setting.nodes))._memory().peak

        limit = setting.device.memory_gib
        return tuple(advise(config, peak, limit, peak_of, on_twice_the_nodes))

    def _indices(self) -> range:
        return range(len(self.model.layers))

    def _method(self) -> Assigned:
        if self.setting.assignment is not None:
            return self.setting.assignment
        own = self.config.parallelism.owner_assignment
        return "lpt" if own == "balanced" else own

    def _sharding(self) -> str:
        stage = "z2" if self._keeps_layers() else "z3"
        if self.mesh.columns == 1:
            return "ddp"
        return f"fsdp_{stage}" if self.mesh.rows == 1 else f"hsdp_{stage}"

    def _keeps_layers(self) -> bool:
        return bool(self.config.parallelism.fsdp_reshard_after_forward == "never")

    def _cluster(self) -> Cluster:
        s = self.setting
        return Cluster(
            device=s.device.key,
            device_name=s.device.name,
            memory_gib=s.device.memory_gib,
            nodes=s.nodes,
            gpus_per_node=s.gpus_per_node,
            rows=self.mesh.rows,
            columns=self.mesh.columns,
        )

    def _assignment(self) -> Assignment:
        s = self.setting
        units = build_units(
            self.model.layers,
            small_matrix_numel=self.config.parallelism.small_matrix_numel,
            expert_units=s.expert_units,
        )
        method = self._method()
        if self.mode != "owner":
            method = "round_robin"  # nothing is owned: only units and times are asked for
        return assign(
            units,
            self.mesh,
            self._cost(),
            method="balanced" if method == "lpt" else method,
            byte_cap=s.byte_cap,
            spread_layers=s.layer_spreading,
            column_first=s.column_balance,
            # Row by row even the flat greedy comes out balanced over columns.
            enumeration="rows" if s.column_balance else "columns",
        )

    def _cost(self) -> CostTable:
        """The cost table: the one asked for, the job's, or the device's if it has every shape."""
        rule = self.rule or MuonRule()
        asked, own = self.setting.cost, self.config.parallelism.owner_cost
        if not asked and self.mode != "fsdp" and own != "measured":
            asked = own
        name = asked or self.setting.device.cost
        if name != "model":
            table = CostTable.load(name)
            try:
                table.check(self.matrices, rule.label())
                return table
            except ValueError:
                if asked:
                    raise
                self.assumptions.append(
                    f"The table {name} does not have this job's shapes or algorithm."
                )
        self.assumptions.append(
            "Update times are a formula's: operations over one rate, whatever the device. They "
            "rank shapes; they predict no device."
        )
        return model_cost([m.shape for m in self.matrices], rule.flops, rule.label())

    def _ns_time(self) -> NsTime:
        s = self.summary
        busiest, mean, bound = s.busiest_seconds, s.mean_seconds, s.bound_seconds
        if self.mode != "owner":
            # Every rank updates everything, or its shards (AdamW: no matrix is orthogonalized).
            everything = mean * s.ranks if self.rule is not None else 0.0
            busiest = mean = bound = everything
        return NsTime(
            busiest_seconds=busiest,
            mean_seconds=mean,
            bound_seconds=bound,
            busiest_over_mean=busiest / mean if mean else 1.0,
            source=s.cost_source,
        )

    def _columns(self) -> Columns:
        if self.mode != "owner":
            return Columns(publish_max_over_mean=1.0, time_max_over_mean=1.0)
        return Columns(
            publish_max_over_mean=self.summary.heaviest_rail_over_mean,
            time_max_over_mean=_over_mean([c.seconds for c in self.summary.column_loads]),
        )

    def _rails(self) -> tuple[Rail, ...]:
        if self.mode != "owner" or self.mesh.rows == 1:
            return ()
        return tuple(
            Rail(
                column=c.column,
                tasks=c.parameters,
                matrices=c.matrices,
                bytes=c.bytes // 2 * self.param_bytes,
                largest_bytes=c.largest_bytes // 2 * self.param_bytes,
                seconds=c.seconds,
            )
            for c in self.summary.column_loads
        )

    def _memory(self) -> Memory:
        masters, state, copies = self.shares.masters(), self.shares.state(), self.shares.copies()
        reduced = self.shares.window() if self.pooled else self.shares.reduced()
        totals = [sum(x) for x in zip(masters, state, copies, reduced, strict=True)]
        heaviest = totals.index(max(totals))
        shares = self.shares
        largest = max((m.numel for m in self.matrices), default=0)
        owned = Owned(
            masters=masters[heaviest] - shares.rest(MASTER_BYTES),
            state=state[heaviest] - shares.rest(shares.adam_bytes),
            copies=copies[heaviest],
            reduced=max(reduced) if self.pooled else reduced[heaviest],
            work=WORK_BYTES * largest if self.rule else 0.0,
        )
        return peak_memory(self.model, self._layout(), owned, self.setting.device)

    def _layout(self) -> Layout:
        p = self.config.parallelism
        return Layout(
            mode=self.mode,
            pooled=self.pooled,
            columns=self.mesh.columns,
            ranks=self.mesh.size,
            keeps_layers=self._keeps_layers(),
            keeps_rest=self._keeps_layers(),
            prefetch=p.prefetch_depth if self.mode == "owner" else 1,
            param_bytes=self.param_bytes,
            reduce_bytes=self.reduce_bytes,
            accumulates=self._micro_batches() > 1,
            adam_bytes=self.shares.adam_bytes,
        )

    def _micro_batches(self) -> int:
        training = self.config.training
        per_pass = int(training.local_batch_size) * self.mesh.size
        return max(1, int(training.global_batch_size) // per_pass)

    def _pool_bytes(self) -> int:
        """What line D keeps in the pool on every rank, leader copies included."""
        if not self.pooled:
            return 0
        layers: int = max(sum(p.numel for p in x.parameters) for x in self.model.layers)
        window, copies = max(self.shares.window()), max(self.shares.copies())
        gathered = gathered_bytes(self.model, self._layout())
        slots = GRADIENT_SLOTS * self.reduce_bytes * layers
        return int(gathered + slots + window + copies)

    def _traffic(self) -> Traffic:
        network = Network(self.mesh.rows, self.mesh.columns, self.setting.gpus_per_node)
        volumes = Volumes(
            mode=self.mode,
            layers=self.owned_numel,
            rest=sum(self.model.rest.values()),
            matrices=self.matrix_numel,
            param_bytes=self.param_bytes,
            reduce_bytes=self.reduce_bytes,
            gathers=1 if self._keeps_layers() else 2,
            micro_batches=self._micro_batches(),
        )
        return traffic(network, volumes)

    def _layers(self) -> tuple[LayerPlace, ...]:
        places: list[list[UnitPlace]] = [[] for _ in self._indices()]
        for unit, owner in zip(self.assignment.units, self.assignment.owners, strict=True):
            places[unit.layer].append(
                UnitPlace(
                    name=unit.name,
                    matrices=len(unit.matrices),
                    parameters=len(unit.parameters),
                    elements=unit.numel + unit.rider_numel,
                    seconds=self.assignment.cost.unit_seconds(unit),
                    rank=owner,
                    row=self.mesh.row(owner),
                    column=self.mesh.column(owner),
                )
            )
        names = [layer.name for layer in self.model.layers]
        return tuple(
            LayerPlace(name=name, units=tuple(units))
            for name, units in zip(names, places, strict=True)
        )

    def _ranks(self) -> tuple[RankPlace, ...]:
        return tuple(
            RankPlace(
                rank=load.rank,
                units=load.units,
                matrices=load.matrices,
                seconds=load.seconds,
                elements=load.numel,
                state_bytes=round(state),
            )
            for load, state in zip(self.summary.rank_loads, self.shares.state(), strict=True)
        )

    def _assumptions(self) -> list[str]:
        device = self.setting.device
        result = [
            f"Newton-Schulz times: {self.summary.cost_source}.",
            "Activations are those of this package's layers run without data, with fused attention "
            "and RMSNorm; attention masks are not counted.",
            f"CUDA context, libraries and NCCL: {device.context_gib:g} GiB. Fragmentation beyond "
            "what the layers leave free for the loss is not counted.",
            "Peaks are within 15 percent of what the DMuon-2 paper measured, with experts within "
            "25, the large ones below it (docs/benchmarks/planner_against_paper.md).",
            "Traffic is what a bandwidth-optimal algorithm moves, averaged over the GPUs.",
        ]
        if self.pooled:
            result.append(
                f"The pool: gradients of {GRADIENT_SLOTS} layers, the owner window, and "
                f"{device.peer_mib:g} MiB of contexts for each other rank, estimated from runs on "
                "16 to 256 GPUs."
            )
        if self.config.compile.enable:
            result.append("Compilation is not modelled; it usually saves activations.")
        if self.config.activation_checkpoint.mode == "memory_budget":
            result.append("memory_budget is planned as if nothing were recomputed.")
        return result + self.assumptions


def _rule(optimizer: Optimizer) -> MatrixOptimizer | None:
    """The matrix optimizer; None: AdamW updates everything."""
    if optimizer.name == "DMuon":
        return rule_of(optimizer)
    return MuonRule() if optimizer.name == "Muon" else None


def _ratio(values: Sequence[float], *, owners_only: bool = False) -> Ratio:
    counted = [x for x in values if x > 0 or not owners_only]
    mean = sum(counted) / len(counted) if counted else 0.0
    return Ratio(busiest=max(values, default=0.0), mean=mean)


def _over_mean(values: Sequence[float]) -> float:
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0
