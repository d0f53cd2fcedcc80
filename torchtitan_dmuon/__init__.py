"""Matrix optimizers with owned matrices under DDP, FSDP2 and HSDP."""

from typing import Any

__version__ = "0.1.0"

# Loaded on first use: tools that only need a submodule must not import torch.
_EXPORTS = {
    "CommunicationError": "comm",
    "CostTable": "ownership",
    "MatrixSpec": "ownership",
    "MatrixOptimizer": "optim.matrix_optimizer",
    "Muon": "optim.muon",
    "OwnerOptimizer": "optim.owner_optimizer",
    "CheckpointError": "checkpoint.errors",
    "check_replicas": "runtime.replicas",
    "clip_grad_norm_": "runtime.api",
    "dedicate_params": "runtime.dedicate",
    "full_params": "runtime.api",
    "load_checkpoint": "checkpoint.own_loop",
    "no_sync": "runtime.api",
    "profile": "tracing",
    "register": "optim.matrix_optimizer",
    "save_checkpoint": "checkpoint.own_loop",
    "skip_backward": "runtime.api",
    "wait_for_publish": "runtime.api",
}

__all__ = [
    "CheckpointError",
    "CommunicationError",
    "CostTable",
    "MatrixOptimizer",
    "MatrixSpec",
    "Muon",
    "OwnerOptimizer",
    "check_replicas",
    "clip_grad_norm_",
    "dedicate_params",
    "full_params",
    "load_checkpoint",
    "no_sync",
    "profile",
    "register",
    "save_checkpoint",
    "skip_backward",
    "wait_for_publish",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
