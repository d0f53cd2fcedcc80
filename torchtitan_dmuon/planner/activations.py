"""Bytes of activations: the model's own layers run on the meta device, and what lives is counted.

No formula per model: each kind of layer runs forward and backward once, at the job's batch and
sequence, under the job's recomputation. Every storage that an operation makes is counted from its
birth to its release, as a caching allocator would see it, without rounding and fragmentation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageMeter(TorchDispatchMode):
    """Counts the bytes of the storages that operations make while it is entered.

    Attributes:
        live: Bytes alive now.
        peak: Most bytes alive at once since it was made, or since `reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count storages that were there before: operations return views of them too."""
        for tensor in tensors:
            self._seen.add(tensor.untyped_storage())

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak = self.live

    def _count(self, storage: Any) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, size)

    def _release(self, size: int) -> None:
        self.live -= size


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of one layer's activations for one micro-batch on one GPU.

    Attributes:
        saved: Kept from its forward to its backward, the output that the next layer reads included.
        forward: Most during its forward.
        backward: Most during its backward, with what it had saved and the gradient of its output.
            Gradients of parameters are not in it.
    """

    saved: int
    forward: int
    backward: int


class _Attention(torch.autograd.Function):
    """What a fused attention kernel keeps: queries, keys, values, output, and a sum per row."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        rows = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, rows)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        q, k, v, _, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class FusedAttention(nn.Module):
    """Stands for any fused attention kernel: none of them runs on the meta device."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return an output of the queries' shape, (batch, sequence, heads, width)."""
        return _Attention.apply(q, k, v)  # type: ignore[no-any-return,no-untyped-call]


class _RMSNorm(torch.autograd.Function):
    """What the fused RMSNorm of CUDA keeps: its input, and a number per row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, scale)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def _rms_norm(x: torch.Tensor, _: Any, weight: Any = None, eps: Any = None) -> torch.Tensor:
    return _RMSNorm.apply(x, weight)  # type: ignore[no-any-return,no-untyped-call]


def _grouped_product(a: torch.Tensor, b: torch.Tensor, **_: Any) -> torch.Tensor:
    """A grouped product's shapes and saved tensors, whatever the sizes of the groups."""
    return torch.matmul(a, b[0])


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Let what has no kernel on the meta device, or another one than on GPUs, keep the same bytes.

    Autocast is left out: where models use it, it makes copies in float32 that live shortly.
    """
    autocast = torch.autocast

    def no_autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return nullcontext() if device_type == "meta" else autocast(device_type, *args, **kwargs)

    with (
        mock.patch.object(torch, "_grouped_mm", _grouped_product),
        mock.patch.object(torch, "autocast", no_autocast),
        mock.patch.object(F, "rms_norm", _rms_norm),
    ):
        yield


def measure_layer(layer: nn.Module, hidden: torch.Tensor, *inputs: Any) -> LayerBytes:
    """Run a layer forward and backward on the meta device and count.

    Args:
        layer: On the meta device, in the dtype that it computes in, its recomputation applied.
        hidden: (batch, sequence, width), its input.
        *inputs: The layer's other arguments.

    Raises:
        Exception: what the layer raises if it cannot run on the meta device.
    """
    hidden = hidden.detach().requires_grad_()
    hooks = _drop_gradients(layer)
    meter = StorageMeter()
    given = [x for x in inputs if isinstance(x, torch.Tensor)]
    meter.leave_out([hidden, *given, *layer.parameters(), *layer.buffers()])
    try:
        with _as_on_a_gpu(), meter:
            # Layers with experts return their load too.
            outputs = [x for x in tree_leaves(layer(hidden, *inputs)) if x.requires_grad]
            saved, forward = meter.live, meter.peak
            meter.reset_peak()
            torch.autograd.backward(outputs, [torch.empty_like(x) for x in outputs])
        return LayerBytes(saved, forward, meter.peak)
    finally:
        hooks()


def measure_loss(
    loss: Callable[[torch.Tensor], torch.Tensor], head: nn.Module, hidden: torch.Tensor
) -> int:
    """Return the most bytes alive in the loss, from the last hidden state to its gradient.

    Args:
        loss: Takes the hidden state, (batch, sequence, width), and returns the loss.
        head: The output head; gradients of its parameters are not counted.
        hidden: On the meta device.
    """
    hidden = hidden.detach().requires_grad_()
    hooks = _drop_gradients(head)
    meter = StorageMeter()
    meter.leave_out([hidden, *head.parameters()])
    try:
        with _as_on_a_gpu(), meter:
            loss(hidden).backward()
        return meter.peak
    finally:
        hooks()


def _drop_gradients(module: nn.Module) -> Callable[[], None]:
    """Let parameters forget their gradients as soon as they have one; return what undoes it."""

    def forget(parameter: torch.Tensor) -> None:
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(forget) for p in module.parameters()]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo
