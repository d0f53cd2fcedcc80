"""Peak memory of the heaviest GPU: what stays, what comes and goes, and the moment of the most.

What stays follows from shapes and owners (paper section 4.4). What comes and goes is looked at in
three moments: the loss, the start of the backward pass, and the optimizer step. The job needs the
most of the three.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from torchtitan_dmuon.planner.devices import Device
from torchtitan_dmuon.planner.model import Description
from torchtitan_dmuon.planner.plan import Memory

GIB = 2**30

ADAM_BYTES = 8
"""Two moments in float32."""

MASTER_BYTES = 4

GRADIENT_SLOTS = 2
"""Groups whose gradients are in the pool at once: one is reduced while the next is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """What the layers' parameters take on the heaviest rank, in bytes.

    Attributes:
        masters: FP32 parameters that it updates.
        state: Optimizer state.
        copies: Copies in the compute dtype that its node gathers from.
        reduced: Reduced gradients, in float32, or in the reduce dtype in an owner window.
        work: What the largest update works in.
    """

    masters: float
    state: float
    copies: float
    reduced: float
    work: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the job is laid out.

    Attributes:
        mode: fsdp, gather or owner.
        pooled: Whether parameters and gradients live in the symmetric pool (line D).
        columns: Ranks that a layer is gathered over.
        ranks: All ranks.
        keeps_layers: Whether gathered layers stay until their backward (ZeRO-2).
        keeps_rest: Whether embedding and output head do.
        prefetch: Layers gathered ahead.
        param_bytes: Bytes of an element in the compute dtype.
        reduce_bytes: Bytes of an element of a gradient that is reduced.
        accumulates: Whether gradients of earlier micro-batches are there from the second on.
        adam_bytes: Optimizer state of an element outside the layers.
    """

    mode: str
    pooled: bool
    columns: int
    ranks: int
    keeps_layers: bool
    keeps_rest: bool
    prefetch: int
    param_bytes: int
    reduce_bytes: int
    accumulates: bool = False
    adam_bytes: int = ADAM_BYTES


@dataclass(slots=True)
class _Moment:
    """Bytes in use at one time, by the parts of `Memory`."""

    parameters: float = 0.0
    masters: float = 0.0
    momentum: float = 0.0
    leader_copies: float = 0.0
    gradients: float = 0.0
    pool: float = 0.0
    activations: float = 0.0
    runtime: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(getattr(self, f.name) for f in fields(self)))


def peak_memory(model: Description, layout: Layout, owned: Owned, device: Device) -> Memory:
    """Return the peak of the heaviest GPU, by parts."""
    moments = [
        _loss(model, layout, owned),
        _backward(model, layout, owned),
        _end_of_backward(model, layout, owned),
        _step(model, layout, owned),
    ]
    most = max(moments, key=lambda moment: moment.total)
    parts = {f.name: getattr(most, f.name) / GIB for f in fields(most)}
    if layout.pooled:
        parts["pool"] += device.peer_mib * 2**20 * (layout.ranks - 1) / GIB
    parts["runtime"] += device.context_gib
    return Memory(**parts, peak=sum(parts.values()))


def _resident(model: Description, layout: Layout, owned: Owned) -> _Moment:
    """Return what is there all the time."""
    rest = sum(model.rest.values()) / layout.columns
    moment = _Moment(
        masters=owned.masters + MASTER_BYTES * rest,
        momentum=owned.state + layout.adam_bytes * rest,
        leader_copies=owned.copies,
    )
    if layout.accumulates:
        moment.gradients = _reduced(model, layout, owned)
    if layout.pooled:
        slots = GRADIENT_SLOTS * layout.reduce_bytes * _largest(model)
        moment.pool = slots + owned.reduced
        moment.parameters = gathered_bytes(model, layout)
    return moment


def _loss(model: Description, layout: Layout, owned: Owned) -> _Moment:
    """The end of the forward pass: all activations, and the logits."""
    moment = _resident(model, layout, owned)
    moment.activations = _saved(model) + model.loss_bytes
    moment.parameters = max(moment.parameters, _kept(model, layout)) + _rest(model, layout)
    # The allocator cannot join the blocks that layers left free to ones that logits would fit in.
    moment.runtime = max(layer.forward - layer.saved for layer in model.layer_bytes)
    if not layout.pooled:
        moment.runtime += max(0.0, gathered_bytes(model, layout) - _kept(model, layout))
    return moment


def _backward(model: Description, layout: Layout, owned: Owned) -> _Moment:
    """The backward of the last layer: nearly all activations, gathered layers, first gradients."""
    moment = _resident(model, layout, owned)
    last = model.layer_bytes[-1]
    moment.activations = _saved(model) - last.saved + last.backward
    moment.parameters = gathered_bytes(model, layout) + _rest(model, layout)
    # The head's whole gradient is still being scattered while that of the layer is computed.
    moment.gradients += model.head_elements * (layout.param_bytes + layout.reduce_bytes)
    if not layout.accumulates:
        moment.gradients += MASTER_BYTES * sum(model.rest.values()) / layout.columns
    if not layout.pooled:
        moment.gradients += _largest(model) * (layout.param_bytes + layout.reduce_bytes)
    return moment


def _end_of_backward(model: Description, layout: Layout, owned: Owned) -> _Moment:
    """The backward of the first layer: the other layers' gradients are reduced."""
    moment = _backward(model, layout, owned)
    moment.activations = model.hidden_bytes + model.layer_bytes[0].backward
    moment.parameters = gathered_bytes(model, replace(layout, keeps_layers=False))
    moment.gradients = _reduced(model, layout, owned)
    if not layout.pooled:
        moment.gradients += _largest(model) * (layout.param_bytes + layout.reduce_bytes)
    return moment


def _step(model: Description, layout: Layout, owned: Owned) -> _Moment:
    """The optimizer step: every reduced gradient, no activations."""
    moment = _resident(model, layout, owned)
    moment.gradients = _reduced(model, layout, owned)
    moment.activations = owned.work
    return moment


def _reduced(model: Description, layout: Layout, owned: Owned) -> float:
    """Bytes of all reduced gradients; those of the layers may be in the pool."""
    rest = MASTER_BYTES * sum(model.rest.values()) / layout.columns
    return rest if layout.pooled else rest + owned.reduced


def _saved(model: Description) -> float:
    # The first layer's input is the embedding's output; the others' are counted as outputs.
    return sum(layer.saved for layer in model.layer_bytes) + model.hidden_bytes


def _sizes(model: Description) -> list[int]:
    return [sum(p.numel for p in layer.parameters) for layer in model.layers]


def _largest(model: Description) -> int:
    return max(_sizes(model))


def _kept(model: Description, layout: Layout) -> float:
    """Bytes of gathered layers between forward and backward."""
    if layout.columns == 1 and layout.mode != "fsdp":
        return 0.0  # the copies are what the layers read
    return layout.param_bytes * sum(_sizes(model)) if layout.keeps_layers else 0.0


def gathered_bytes(model: Description, layout: Layout) -> float:
    """Return the bytes of gathered layers while one computes and others are prefetched."""
    if layout.keeps_layers or layout.columns == 1:
        return _kept(model, layout)
    most = sum(_sizes(model))
    return layout.param_bytes * min(most, _largest(model) * (1 + layout.prefetch))


def _rest(model: Description, layout: Layout) -> float:
    """Bytes of the gathered output head, and of the embedding where it stays."""
    elements = model.head_elements
    if not model.tied and layout.keeps_rest:
        elements += model.embedding_elements
    return layout.param_bytes * elements
