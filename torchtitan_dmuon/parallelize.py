"""The parallelize step of every model: the seam at which `[parallelism] mode` takes effect."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import (
    disable_fsdp_gradient_division,
    enable_fsdp_symm_mem,
    get_fsdp_reshard_after_forward_policy,
)
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.config.schema import Parallelism
from torchtitan_dmuon.models.fused_qkv import fused_qkv_specs
from torchtitan_dmuon.models.heads import head_specs
from torchtitan_dmuon.models.init import init_through_owners
from torchtitan_dmuon.optim.matrix_optimizer import MatrixOptimizer
from torchtitan_dmuon.runtime.dedicate import Dedication, dedicate_params
from torchtitan_dmuon.runtime.transport import OperatorsRefused


def parallelize(
    model: nn.Module,
    *,
    parallelism: Parallelism,
    titan_parallelize: Callable[..., nn.Module],
    timeout: timedelta | None = None,
    algorithm: MatrixOptimizer | None = None,
    per_head: bool = False,
    **kwargs: Any,
) -> nn.Module:
    """Apply tensor, activation and data parallelism to a model on the meta device.

    Args:
        model: A decoder, not yet sharded.
        parallelism: The resolved section; its mode selects who holds the weight matrices.
        titan_parallelize: torchtitan's own function for this model.
        timeout: Limit of an operation on owned matrices; None: that of the process group.
        algorithm: The matrix optimizer that owners are balanced for; None: none is there.
        per_head: Whether each attention head's rows of Q, K and V are a matrix.
        **kwargs: What torchtitan passes to that function: parallel_dims, training,
            compile_config, ac_config, dump_folder.

    Returns:
        The same model, sharded.
    """
    match parallelism.mode:
        case "fsdp":
            return titan_parallelize(model, parallelism=parallelism, **kwargs)
        case "gather" | "owner":
            assert algorithm is not None
            return parallelize_owned(
                model,
                parallelism=parallelism,
                timeout=timeout,
                algorithm=algorithm,
                per_head=per_head,
                **kwargs,
            )


def with_modes(
    spec: ModelSpec,
    timeout: timedelta | None = None,
    algorithm: MatrixOptimizer | None = None,
    per_head: bool = False,
) -> ModelSpec:
    """Route a model's parallelize step through `parallelize`; changes and returns the spec."""
    spec.parallelize_fn = functools.partial(
        parallelize,
        titan_parallelize=spec.parallelize_fn,
        timeout=timeout,
        algorithm=algorithm,
        per_head=per_head,
    )
    return spec


def parallelize_owned(
    model: nn.Module,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: Parallelism,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointingConfig | None,
    dump_folder: str,
    algorithm: MatrixOptimizer,
    per_head: bool = False,
    timeout: timedelta | None = None,
) -> nn.Module:
    """Apply activation checkpointing, compile, owners and, around the layers, FSDP.

    For any of torchtitan's decoders, in the order of torchtitan's own functions: what they do with
    `fully_shard` on a transformer block, `dedicate_params` does here.

    Args:
        model: A decoder with `layers`, `tok_embeddings`, `norm` and `lm_head`, on the meta device.
        parallel_dims: With data parallelism only.
        training: Precision.
        parallelism: Mode and the settings of owners.
        compile_config: Compiles each block if it asks for the model.
        ac_config: Activation checkpointing; None: none.
        dump_folder: For what activation checkpointing may write.
        algorithm: The matrix optimizer that owners are balanced for.
        per_head: Whether each attention head's rows of Q, K and V are a matrix.
        timeout: Limit of an operation on owned matrices.

    Returns:
        The same model. Its weights are still to be made (`to_empty`, `init_weights`).
    """
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    mesh = parallel_dims.get_mesh(names)
    init_through_owners(model)
    dedication = _dedicate(model, mesh, training, parallelism, algorithm, per_head, timeout)
    _shard_the_rest(model, mesh, dedication, training, parallelism)
    return model


def _dedicate(
    model: nn.Module,
    mesh: DeviceMesh,
    training: TrainingConfig,
    parallelism: Parallelism,
    algorithm: MatrixOptimizer,
    per_head: bool,
    timeout: timedelta | None,
) -> Dedication:
    layers: Any = model.layers
    blocks = set(layers.values())
    give = functools.partial(
        dedicate_params,
        model,
        mesh,
        hook_boundary_predicate=lambda name, module: module in blocks,
        reshard_after_forward=get_fsdp_reshard_after_forward_policy(
            parallelism.fsdp_reshard_after_forward, pp_enabled=False
        ),
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        cast_forward_inputs=False,
        matrix_specs=head_specs(model) if per_head else fused_qkv_specs(model),
        communication=parallelism.communication,
        mode="gather" if parallelism.mode == "gather" else "owner",
        algorithm=algorithm,
        cost=parallelism.owner_cost,
        assignment=parallelism.owner_assignment,
        small_matrix_numel=parallelism.small_matrix_numel,
        byte_cap=parallelism.byte_cap,
        prefetch_depth=parallelism.prefetch_depth,
        # The trainer divides the loss by the tokens of all ranks.
        gradient_divide_factor=1.0,
        timeout=timeout,
    )
    try:
        return give()
    except OperatorsRefused as error:
        raise ConfigError(f"parallelism.{error}") from None


def _shard_the_rest(
    model: Any,
    mesh: DeviceMesh,
    dedication: Dedication,
    training: TrainingConfig,
    parallelism: Parallelism,
) -> None:
    """Shard what is outside the layers, as torchtitan's apply_fsdp_to_decoder does."""
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        cast_forward_inputs=False,
    )
    shard: Any = functools.partial(fully_shard, mesh=mesh, mp_policy=policy)
    reshard = get_fsdp_reshard_after_forward_policy(
        parallelism.fsdp_reshard_after_forward, pp_enabled=False
    )
    # The last layers are used again at once; torchtitan frees them only if it is asked to.
    reshard_last = parallelism.fsdp_reshard_after_forward == "always"
    if model.enable_weight_tying:
        shard([model.tok_embeddings, model.norm, model.lm_head], reshard_after_forward=reshard_last)
    else:
        shard(model.tok_embeddings, reshard_after_forward=reshard)
        shard([model.norm, model.lm_head], reshard_after_forward=reshard_last)
    shard(model, ignored_params=dedication.parameters)
    if parallelism.enable_fsdp_symm_mem:
        enable_fsdp_symm_mem(model)
    disable_fsdp_gradient_division(model)
