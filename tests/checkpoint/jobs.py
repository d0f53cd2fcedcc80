"""Small training jobs over every layout, which save and load through the checkpoint manager.

The model is a decoder of two blocks with all kinds of parameters: grouped query-key-value weights
with biases (torchtitan's modules, separate or fused), norms, a stack of experts, embeddings and a
head. The batch of a step is the same however many ranks share it.
"""

from __future__ import annotations

import functools
import logging
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH, HEADS, KV_HEADS, HIDDEN, EXPERTS, VOCABULARY = 32, 4, 2, 40, 3, 31
SEQUENCES, LENGTH = 24, 8
HALF, END = 2, 4
"""Steps after which jobs save."""


# Beside the ranks of a world, which have one thread each, more threads only wait for each other.
torch.set_num_threads(1)


@dataclass(frozen=True)
class Layout:
    """Who holds what.

    Attributes:
        mode: "owner" or "gather" (Muon), "adamw" or "torch" (FSDP2 with AdamW or torch's Muon).
        mesh: (replicate, shard).
        zero: 2 or 3.
        fused: Whether Q, K and V are one weight.
        dropout: Makes the result depend on the random generators, and so on the ranks.
        algorithm: The matrix optimizer of mode "owner".
        merged: No experts, and all matrices of a layer have one owner: only two ranks own anything.
    """

    mode: str
    mesh: tuple[int, int]
    zero: int = 3
    fused: bool = False
    dropout: float = 0.0
    merged: bool = False
    algorithm: str = "muon"

    @property
    def size(self) -> int:
        return self.mesh[0] * self.mesh[1]

    @property
    def name(self) -> str:
        extras = "_fused" * self.fused + "_dropout" * bool(self.dropout) + "_merged" * self.merged
        own = "" if self.algorithm == "muon" else f"{self.algorithm}_"
        return f"{own}{self.mode}_{self.mesh[0]}x{self.mesh[1]}_z{self.zero}{extras}"


class Attention(nn.Module):
    """Causal attention over torchtitan's projections."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        from torchtitan.models.common.attention import FusedQKVLinear, QKVLinear
        from torchtitan.models.common.linear import Linear

        size = WIDTH // HEADS
        make = functools.partial(Linear.Config, in_features=WIDTH, bias=True)
        if fused:
            self.qkv = FusedQKVLinear.Config(
                head_dim=size,
                n_heads=HEADS,
                n_kv_heads=KV_HEADS,
                wqkv=make(out_features=(HEADS + 2 * KV_HEADS) * size),
            ).build()
        else:
            self.qkv = QKVLinear.Config(
                head_dim=size,
                wq=make(out_features=HEADS * size),
                wkv=make(out_features=KV_HEADS * size),
            ).build()
        self.wo = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.qkv(x))
        # Without this a key's bias has no gradient.
        q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Gated, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Experts(nn.Module):
    """A stack of matrices; all experts see all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / HIDDEN**0.5)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(x.reshape(1, -1, WIDTH) @ self.up.mT) @ self.down.mT
        return hidden.sum(0).view_as(x)


class Block(nn.Module):
    def __init__(self, fused: bool, dropout: float, experts: bool) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention(fused)
        self.ffn = Experts() if experts else FeedForward()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.ffn(self.ffn_norm(x)))


class Decoder(nn.Module):
    def __init__(self, fused: bool = False, dropout: float = 0.0, experts: bool = True) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(fused, dropout, e) for e in (False, experts))
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def build_model(layout: Layout, seed: int = 0) -> Decoder:
    """Return the same weights, fused or not."""
    torch.manual_seed(seed)
    model = Decoder(False, layout.dropout, not layout.merged)
    if not layout.fused:
        return model
    result = Decoder(True, layout.dropout, not layout.merged)
    result.load_state_dict(model.state_dict())
    return result


def place(model: nn.Module, layout: Layout) -> Any:
    """Distribute a model; return its dedication, or None under plain FSDP2."""
    import torchtitan_dmuon as dmuon
    from torchtitan_dmuon.models.fused_qkv import fused_qkv_specs

    mesh = None
    if layout.size > 1:
        mesh = init_device_mesh("cpu", layout.mesh, mesh_dim_names=("replicate", "shard"))
    shard = functools.partial(fully_shard, mesh=mesh, reshard_after_forward=layout.zero == 3)
    if layout.mode in ("owner", "gather"):
        owned = dmuon.dedicate_params(
            model,
            mesh,
            mode=layout.mode,
            algorithm=layout.algorithm,
            cost="model",
            reshard_after_forward=layout.zero == 3,
            small_matrix_numel=10**9 if layout.merged else 500,
            matrix_specs=fused_qkv_specs(model),
        )
        if mesh is not None:
            shard(model, ignored_params=owned.parameters)
        return owned
    if mesh is not None:
        for layer in model.layers:  # type: ignore[union-attr]
            shard(layer)
        shard(model)
    return None


def build_optimizers(model: nn.Module, layout: Layout, **options: Any) -> Any:
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    from torchtitan_dmuon.baselines.torch_muon import MATRICES, TorchMuonContainer
    from torchtitan_dmuon.optim.container import OwnerContainer

    if layout.mode in ("owner", "gather"):
        shared = {f.name for f in fields(OwnerContainer.Config)}
        others = {k: options.pop(k) for k in list(options) if k in shared}
        config = OwnerContainer.Config(
            **{"adamw_lr": 3e-3, "algorithm": layout.algorithm, **others},
            options={"lr": 0.02, **options},
        )
        return OwnerContainer(config, model_parts=[model])
    rest = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, **options}
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=rest)]
    if layout.mode == "adamw":
        config = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
        return OptimizersContainer(config, model_parts=[model])
    muon = ParamGroupConfig(
        pattern=MATRICES, optimizer_name="Muon", optimizer_kwargs={"lr": 0.02, "ns_steps": 0}
    )
    config = TorchMuonContainer.Config(param_groups=[muon, *groups], implementation="for-loop")
    return TorchMuonContainer(config, model_parts=[model])


class Position:
    """Where a job is in its data."""

    def __init__(self) -> None:
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def rank_of() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Job:
    """A job on this rank, with the state that torchtitan's trainer hands to its manager.

    Args:
        layout: Its ranks.
        folder: Of its checkpoints.
        options: Of the optimizer.
        seed: Of the weights.
        stock: Whether torchtitan's own manager saves and loads.
        checkpoint: Of the checkpoint manager.
    """

    def __init__(
        self,
        layout: Layout,
        folder: str | Path,
        options: Mapping[str, Any] | None = None,
        seed: int = 0,
        stock: bool = False,
        **checkpoint: Any,
    ) -> None:
        from torchtitan.components import checkpointer as titan
        from torchtitan.components.optimizer import LRSchedulersContainer

        from torchtitan_dmuon.checkpoint.manager import CheckpointManager

        self.layout, self.step, self.losses = layout, 0, []
        self.model = build_model(layout, seed)
        self.owned = place(self.model, layout)
        self.optimizers = build_optimizers(self.model, layout, **(options or {}))
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=3, total_steps=12).build(
            optimizers=self.optimizers, training_steps=12
        )
        self.data = Position()
        settings = {"enable": True, "interval": HALF, "keep_latest_k": 0, "folder": str(folder)}
        settings["initial_load_model_only"] = False
        kind = titan.CheckpointManager if stock else CheckpointManager
        config = kind.Config(**{**settings, **checkpoint})
        self.manager = kind(
            config,
            dataloader=self.data,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=None,
        )
        for number, seeding in enumerate((torch.manual_seed, random.seed, np.random.seed)):
            seeding(1000 * number + rank_of())

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])

    def loss(self) -> torch.Tensor:
        """Return this rank's loss on its part of the next batch: a permutation to be learnt."""
        generator = torch.Generator().manual_seed(200 + self.data.next)
        tokens = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH), generator=generator)
        mine = tokens.tensor_split(self.layout.size)[rank_of()]
        targets = mine * 7 % VOCABULARY
        return F.cross_entropy(self.model(mine).flatten(0, 1), targets.flatten())

    def train(self, until: int, save_at: tuple[int, ...] = ()) -> Job:
        while self.step < until:
            self.optimizers.zero_grad()
            loss = self.loss()
            loss.backward()
            self.optimizers.step()
            self.schedulers.step()
            self.data.next += 1
            self.step += 1
            mean = loss.detach().clone()
            if dist.is_initialized() and self.layout.size > 1:
                dist.all_reduce(mean)
            self.losses.append(float(mean) / self.layout.size)
            if self.step in save_at:
                self.manager.save(self.step)
        return self

    def close(self) -> None:
        self.manager.maybe_wait_for_staging()
        self.manager.maybe_wait_for_saving()
        self.manager.close()
        if self.owned is not None and self.owned.runtime.communicator is not None:
            self.owned.runtime.communicator.close()


@dataclass(frozen=True)
class Task:
    """One job of a world.

    Attributes:
        layout: Its ranks, all of the world.
        folder: Where it saves, at steps HALF and END.
        load: A checkpoint to go on from; it is then saved again at once.
        until: The last step.
        async_mode: See torchtitan.
        options: Of the optimizer.
    """

    layout: Layout
    folder: str
    load: str | None = None
    until: int = END
    async_mode: str = "disabled"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Done:
    """What a job did: losses, rates of the last step, and the lines that the product logged."""

    losses: list[float]
    rates: list[float]
    lines: list[str]


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self.log = logging.getLogger("torchtitan_dmuon")

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        self.log.addHandler(self)
        self.before = self.log.level
        self.log.setLevel(logging.INFO)
        return self.lines

    def __exit__(self, *_: object) -> None:
        self.log.removeHandler(self)
        self.log.setLevel(self.before)


def open_world() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=40))


def run_task(task: Task) -> Done:
    """Run one job; called by every rank."""
    start = {"initial_load_path": task.load, "initial_load_model_only": False}
    with Lines() as lines:
        # Other weights than the ones that are loaded.
        job = Job(
            task.layout,
            task.folder,
            task.options,
            seed=5 if task.load else 0,
            async_mode=task.async_mode,
            **start,
        )
        if task.load:
            assert job.manager.load()
            job.manager.save(job.step)
        job.train(task.until, (HALF, END))
        job.close()
    rates = [float(g["lr"]) for o in job.optimizers.optimizers for g in o.param_groups]
    return Done(job.losses, rates, lines)


def run_tasks(tasks: tuple[Task, ...]) -> list[Done]:
    """Run jobs one after the other in this world."""
    open_world()
    return [run_task(task) for task in tasks]


def stored(path: str | Path) -> dict[str, Any]:
    """Return all of a checkpoint, tensors in full, as torch itself reads it."""
    state: dict[str, Any] = {}
    _load_state_dict(
        state,
        storage_reader=FileSystemReader(path),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else key, inner)
        else:
            flat[prefix] = value

    walk("", state)
    return flat


def tensors(path: str | Path, *, model: bool = True, optimizer: bool = True) -> dict[str, Any]:
    """Return the tensors of model and optimizer state in a checkpoint."""
    result = {}
    for key, value in stored(path).items():
        top = key.split(".")[0]
        if isinstance(value, torch.Tensor) and (
            (optimizer and key.startswith("optimizer.state."))
            or (model and top not in ("optimizer", "rng", "train_state", "dataloader"))
        ):
            result[key] = value
    return result
