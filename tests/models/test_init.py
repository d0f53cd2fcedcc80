"""Initialisation gives the same bits for any sharding.

Four gloo ranks are started once for the whole file; each writes what it sees and the tests compare
that with this process, which has no process group or one rank.
"""

import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.multiprocessing.spawn import start_processes
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common import Linear
from torchtitan.models.common.param_init import skip_param_init

from torchtitan_dmuon.models.init import (
    LayoutIndependentInit,
    _local_shard,
    make_init_layout_independent,
)
from torchtitan_dmuon.models.registry import get_model_spec

WORLD = 4
SEED = 1234
SHAPES = [(7, 5), (3, 6), (1, 9), (8, 4)]
LAYOUTS = {
    "rows": ((4,), (Shard(0),)),
    "columns": ((4,), (Shard(1),)),
    "last-dim": ((4,), (Shard(-1),)),
    "hsdp": ((2, 2), (Replicate(), Shard(0))),
    "hsdp-columns": ((2, 2), (Replicate(), Shard(1))),
    "two-axes": ((2, 2), (Shard(0), Shard(1))),
    "rows-twice": ((2, 2), (Shard(0), Shard(0))),
    "one-replica": ((1, 4), (Replicate(), Shard(0))),
    "one-shard": ((4, 1), (Replicate(), Shard(0))),
}
STOCK = ("rows", "columns", "hsdp")  # Layouts also drawn without the wrapper.
# name: (model, flavor, data-parallel replicas, shards, tensor-parallel ranks)
MODELS = {
    "qwen-fsdp": ("qwen2_5", "debug", 1, 4, 1),
    "qwen-hsdp": ("qwen2_5", "debug", 2, 2, 1),
    "qwen-fsdp-tp": ("qwen2_5", "debug", 1, 2, 2),
    "llama-fused-qkv-fsdp": ("llama3", "debugmodel", 1, 4, 1),
}

Bits = dict[str, str]


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def _linear_bits(
    shape: tuple[int, int], shard: Callable[[torch.Tensor], torch.Tensor], *, independent: bool
) -> Bits:
    """Initialise a linear layer whose weight is sharded; return its bits and the stream's."""
    config = Linear.Config(
        in_features=shape[1],
        out_features=shape[0],
        param_init={"weight": partial(nn.init.normal_, std=0.02)},
    )
    if independent:
        make_init_layout_independent(config)
    layer = config.build()
    layer.weight = nn.Parameter(shard(torch.full(shape, torch.nan)))
    torch.manual_seed(SEED)
    layer.init_states()
    weight = layer.weight.detach()
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
    return {"weight": _digest(weight), "stream": _digest(torch.rand(4))}


def _sharded_model(case: str, world: int) -> Any:
    """Build, shard and initialise a model as torchtitan's trainer does."""
    name, flavor, replicas, shards, tensor_parallel = MODELS[case]
    if world == 1:
        replicas = shards = tensor_parallel = 1
    spec = get_model_spec(name, flavor, attn_backend="sdpa")
    parallelism = ParallelismConfig(
        spmd_backend="partial_dtensor",
        data_parallel_replicate_degree=replicas,
        data_parallel_shard_degree=shards,
        tensor_parallel_degree=tensor_parallel,
    )
    del spec.model.layers[2:]  # Enough to meet every kind of parameter twice.
    spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    for layer in spec.model.layers:
        layer.attention.rope.max_seq_len = 16
        if name == "qwen2_5":  # Zero biases would hide a wrong shard.
            for projection in (layer.attention.qkv_linear.wq, layer.attention.qkv_linear.wkv):
                projection.param_init["bias"] = nn.init.normal_
    make_init_layout_independent(spec.model)
    with torch.device("meta"):
        model = spec.model.build()
    if world > 1:
        dist_utils.set_spmd_backend("partial_dtensor")
        spec.parallelize_fn(
            model,
            parallel_dims=ParallelDims.from_config(parallelism, world),
            training=TrainingConfig(mixed_precision_param="float32"),
            parallelism=parallelism,
            compile_config=CompileConfig(),
            ac_config=None,
            dump_folder="",
        )
    model.to_empty(device="cpu")
    torch.manual_seed(SEED)
    with torch.no_grad():
        model.init_states()
    return model


def _model_bits(model: Any) -> Bits:
    bits = {"stream": _digest(torch.rand(4))}
    for name, parameter in model.named_parameters():
        is_dtensor = isinstance(parameter, DTensor)
        bits[name] = _digest(parameter.full_tensor() if is_dtensor else parameter)
    return bits


def _logits(model: Any) -> torch.Tensor:
    """Logits of two packed documents, [1, 16, V]; collective when the model is sharded."""
    tokens = torch.arange(16)[None] * 97 % 2048
    positions = torch.cat([torch.arange(6), torch.arange(10)])[None]
    with torch.no_grad():
        logits = model(tokens, positions, model.get_attention_masks(positions))
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def _shard_over(mesh: Any, placements: tuple[Any, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda full: distribute_tensor(full, mesh, placements, src_data_rank=None)


def _chunk(tensor: torch.Tensor, parts: int, index: int) -> torch.Tensor:
    chunks = tensor.chunk(parts)
    return chunks[index] if index < len(chunks) else tensor[:0]


def _worker(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=WORLD
    )
    results: dict[str, Any] = {}
    for name, (mesh_shape, placements) in LAYOUTS.items():
        shard = _shard_over(init_device_mesh("cpu", mesh_shape), placements)
        for shape in SHAPES:
            results[f"{name} {shape}"] = _linear_bits(shape, shard, independent=True)
        if name in STOCK:
            results[f"stock {name}"] = _linear_bits(SHAPES[0], shard, independent=False)
    for case in MODELS:
        model = _sharded_model(case, WORLD)
        results[case] = _model_bits(model)
        results[f"{case} logits"] = _logits(model)
    torch.save(results, f"{directory}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks saw: case name to the digests of its tensors, or to logits."""
    directory = tmp_path_factory.mktemp("init")
    # The fork server imports torchtitan once; spawning would import it in each of the four ranks.
    multiprocessing.set_forkserver_preload(
        ["torchtitan.models.llama3", "torchtitan.models.qwen3", "torchtitan.trainer"]
    )
    start_processes(  # type: ignore[no-untyped-call, unused-ignore]
        _worker, args=(str(directory),), nprocs=WORLD, start_method="forkserver"
    )
    return [torch.load(Path(directory) / f"{rank}.pt") for rank in range(WORLD)]


@pytest.fixture(scope="module")
def alone() -> Callable[[tuple[int, int]], Bits]:
    """The bits of a plain, unsharded tensor in one process, without the wrapper."""
    return lambda shape: _linear_bits(shape, lambda full: full, independent=False)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A gloo process group of this process alone."""
    rendezvous = f"file://{tmp_path}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_ranks_draw_the_bits_of_one_process(
    layout: str,
    shape: tuple[int, int],
    ranks: list[dict[str, Any]],
    alone: Callable[[tuple[int, int]], Bits],
) -> None:
    """Weights, and the random stream after them, do not depend on mesh, placement or unevenness."""
    for rank in ranks:
        assert rank[f"{layout} {shape}"] == alone(shape)


@pytest.mark.parametrize("layout", STOCK)
def test_stock_initialisation_depends_on_the_layout(
    layout: str,
    ranks: list[dict[str, Any]],
    alone: Callable[[tuple[int, int]], Bits],
) -> None:
    """The test above has power: without the wrapper the bits change with the sharding."""
    assert ranks[0][f"stock {layout}"]["weight"] != alone(SHAPES[0])["weight"]


@pytest.mark.parametrize("case", MODELS)
def test_whole_models_are_the_same_on_four_ranks(case: str, ranks: list[dict[str, Any]]) -> None:
    """FSDP2, HSDP, FSDP2 with tensor parallelism, and fused QKV: one set of bits, one function.

    The logits guard the tensor-parallel plan, QKV biases included.
    """
    model = _sharded_model(case, world=1)
    bits, logits = _model_bits(model), _logits(model)
    for rank in ranks:
        assert rank[case] == bits
        torch.testing.assert_close(rank[f"{case} logits"], logits, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("mesh_shape", [(1,), (1, 1)], ids=str)
def test_one_rank_draws_the_bits_of_no_rank(
    mesh_shape: tuple[int, ...], alone: Callable[[tuple[int, int]], Bits]
) -> None:
    """A process group of one rank changes nothing."""
    placements = (Replicate(), Shard(0))[-len(mesh_shape) :]
    shard = _shard_over(init_device_mesh("cpu", mesh_shape), placements)
    assert _linear_bits((7, 5), shard, independent=True) == alone((7, 5))


@pytest.mark.usefixtures("one_rank")
def test_unsupported_placement_is_refused() -> None:
    """A partial parameter has no defined shard: an error, not a silently wrong weight."""
    mesh = init_device_mesh("cpu", (1,))
    partial_param = DTensor.from_local(torch.zeros(2, 2), mesh, (Partial(),))
    with pytest.raises(NotImplementedError, match=r"placement P\(sum\)"):
        LayoutIndependentInit(nn.init.normal_)(partial_param)


def test_wrapping_is_idempotent_and_leaves_skipped_parameters_alone() -> None:
    """Two calls wrap once; skip_param_init stays itself; dicts shared between configs survive."""
    init = {"weight": nn.init.normal_, "bias": skip_param_init}
    first = Linear.Config(in_features=2, out_features=3, param_init=init)
    make_init_layout_independent(first)
    once = dict(first.param_init)
    make_init_layout_independent(first)
    assert first.param_init == once
    assert isinstance(once["weight"], LayoutIndependentInit)
    assert once["weight"].init is nn.init.normal_
    assert first.param_init["bias"] is skip_param_init
    assert init == {"weight": nn.init.normal_, "bias": skip_param_init}


@pytest.mark.parametrize("rows", [1, 4, 7, 9, 12, 13])
def test_uneven_shards_of_fsdp_over_tensor_parallel(rows: int) -> None:
    """FSDP2 cuts what tensor parallelism cut before; cutting in mesh order gives other rows.

    7 rows over 3 x 2 ranks: the second tensor-parallel half is rows 4 to 6 and FSDP2 gives one to
    each of its ranks, while ``distribute_tensor`` leaves the last rank with none.
    """
    full = torch.arange(rows)
    mesh: Any = SimpleNamespace(ndim=2, size=(3, 2).__getitem__)
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    for tp_rank in range(2):
        half = _chunk(full, 2, tp_rank)
        for fsdp_rank in range(3):
            shard = _local_shard(full, mesh, placements, (fsdp_rank, tp_rank))
            assert torch.equal(shard, _chunk(half, 3, fsdp_rank))


def test_wrapped_config_can_be_logged() -> None:
    """torchtitan writes the config as JSON at the start of a run; the wrapper must survive that."""
    config = get_model_spec("qwen2_5", "debug", attn_backend="flex").model
    make_init_layout_independent(config)
    logged = json.dumps(config.to_dict())
    assert "LayoutIndependentInit(functools.partial(<function normal_" in logged


@pytest.mark.parametrize("name", ["qwen2_5", "llama3", "qwen3"])
def test_every_initialiser_of_a_model_is_wrapped(name: str) -> None:
    """No sub-config escapes: every initialiser of the built model is layout independent."""
    flavor = "debug" if name == "qwen2_5" else "debugmodel"
    config = get_model_spec(name, flavor, attn_backend="flex").model
    make_init_layout_independent(config)
    with torch.device("meta"):
        model = config.build()
    for fqn, module in model.named_modules():
        for parameter_name, _ in module.named_parameters(recurse=False):
            init = module._param_init[parameter_name]
            assert isinstance(init, LayoutIndependentInit) or init is skip_param_init, fqn
