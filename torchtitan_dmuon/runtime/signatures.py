"""Gradients that are born in their places, and storages that move (paper 4.2 and C.1).

`Signatures` recognises the allocation that will become a parameter's gradient by where it is made
in the layer's backward, and has it made in the parameter's place in a pool. One backward goes:

    signatures.begin()                              # on every first call of a backward
    signatures.enter(stage, {key: place, ...})      # the layer's backward begins
    ...                                             # autograd runs the layer
    in_place = signatures.deliver({key: parameter.grad, ...})
    # those are there; the others are copied to their places
    signatures.leave()

`move_storage` lets a tensor, and every tensor that shares its storage, live in other memory.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan_dmuon.native.torch_library import load_allocator

logger = logging.getLogger("torchtitan_dmuon")

PLACE_ALIGNMENT = 64
"""Bytes; places begin at multiples of it, as torch's own CPU memory does."""

_IN_PLACE = 1  # Outcome::in_place of csrc/allocator/signatures.h


def move_storage(tensor: torch.Tensor, target: torch.Tensor, *, copy: bool) -> None:
    """Have a tensor's storage live in the memory of `target`.

    Everything that shares the storage follows: views, parameters, what autograd saved. The storage
    keeps its allocator, so `resize_(0)` gives the memory back, and `resize_(n)` takes ordinary one.

    Args:
        tensor: Any strided tensor on a CPU or a CUDA device; its storage may be without bytes.
        target: Contiguous, of any dtype, on the same device, at a multiple of `PLACE_ALIGNMENT`,
            with at least the bytes that the storage has and the tensor reaches. It is kept alive as
            long as the storage lives there.
        copy: Whether the storage's bytes are copied to `target`, in the present stream. Otherwise
            the tensor has what `target` holds.

    Raises:
        ValueError: `target` is too small, elsewhere, not contiguous, or the same storage.
    """
    _ops().move_storage(tensor, target, copy)


def move_back(tensor: torch.Tensor, *, copy: bool) -> None:
    """Have a tensor's storage live in ordinary memory of its length; the inverse of `move_storage`.

    Args:
        tensor: Any strided tensor on a CPU or a CUDA device.
        copy: Whether its content goes with it, in the present stream; otherwise it is undefined.

    Raises:
        ValueError: the tensor has no memory there.
    """
    _ops().move_back(tensor, copy)


@dataclass(frozen=True, slots=True)
class Lodger:
    """A tensor that lives in memory of the pool by a signature, and could not be moved.

    Attributes:
        memory: Where, uint8.
        fixed: Whether that is known: `numpy()` has made an array of it. Otherwise it is not known
            who has it.
    """

    memory: torch.Tensor
    fixed: bool


@dataclass(frozen=True, slots=True)
class Counters:
    """Deliveries of gradients whose place was given, by what became of them.

    Attributes:
        hits: Born in their places.
        misses: Elsewhere, although a signature was known.
        relearned: Misses whose new signature was found at once.
        learned: Elsewhere, since no signature was known yet; one is now.
        unlearned: Elsewhere, in memory that is no allocation of just the gradient's size.
    """

    hits: int
    misses: int
    relearned: int
    learned: int
    unlearned: int

    @property
    def hit_rate(self) -> float:
        """Hits among those whose signature was known; 1 if there were none.

        What can never be born in its place is not among them: it is named (`unplaceable`).
        """
        known = self.hits + self.misses
        return self.hits / known if known else 1.0


class Signatures:
    """The allocation signatures of one model's parameters on one device.

    The calls of a backward come from the thread that runs it. Only one layer is entered at a time.

    Args:
        names: Of the parameters; an index in it is the parameter's key.
        device: Where gradients are made.

    Raises:
        NativeError: csrc/allocator cannot be compiled or loaded.
        ValueError: the device is neither a CPU nor one CUDA device that this torch knows.
        RuntimeError: another allocator was installed over this one.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = tuple(names)
        self.device = device
        ops = _ops()
        self._ops = ops
        self._table: int = ops.open(device, len(self.names))
        self._given_up = 0
        self._reported: set[int] = set()
        self._close = weakref.finalize(self, ops.close, self._table)
        # At exit tensors may still live in places: the wrapper stays.
        self._close.atexit = False

    def close(self) -> None:
        """Take the wrapper away from torch's allocator, if this was its last user."""
        self._close()

    def begin(self) -> None:
        """A backward begins: numbers start anew, and places that were given before are void.

        To be called at the first hook of every backward, and once more where one backward takes
        several forward passes one after the other. It also ends what a failed backward left open.
        """
        self._ops.begin(self._table)

    def enter(self, layer: int, places: Mapping[int, torch.Tensor] | None = None) -> None:
        """The backward of a layer begins, or goes on, on the calling thread.

        Args:
            layer: Any number that is the layer's in every backward. A layer that is used twice has
                two. Entered again before the next `begin`, its numbers go on.
            places: By key, a contiguous tensor of the gradient's dtype and numel, at a multiple of
                `PLACE_ALIGNMENT` bytes. None: signatures are learned only. A place holds until its
                `deliver` or the next `begin`. A gradient of an earlier delivery that somebody
                keeps, and that lives in one of them, is moved to ordinary memory.

        Raises:
            ValueError: an unknown key, or a place that is elsewhere, not contiguous or not aligned.
        """
        given = places or {}
        self._ops.enter(self._table, layer, list(given), list(given.values()))

    def leave(self) -> None:
        """No layer's backward runs: allocations are nobody's."""
        self._ops.leave(self._table)

    def deliver(self, gradients: Mapping[int, torch.Tensor | None]) -> frozenset[int]:
        """Take note of what autograd handed over, before anything is written to the places.

        A gradient that lives in another one's place, or in its own but not contiguous, is moved to
        ordinary memory first: whoever is not in place may be copied in any order. Not one whose
        storage cannot be resized: `numpy()` has made an array of it, which would not follow.

        Args:
            gradients: By key, the complete gradient; None where there is none.

        Returns:
            Keys whose gradient fills its place.

        Raises:
            ValueError: an unknown key.
        """
        keys = list(gradients)
        *outcomes, given_up = self._ops.deliver(self._table, keys, list(gradients.values()))
        if given_up != self._given_up:
            self._given_up = given_up
            self._report()
        return frozenset(key for key, x in zip(keys, outcomes, strict=True) if x == _IN_PLACE)

    def vacate(self, memory: torch.Tensor, candidates: Iterable[torch.Tensor] = ()) -> list[Lodger]:
        """Have memory of the pool free of tensors that live there by a signature.

        Places in it that were given are void: until they are given again nothing is born there.
        Gradients that were delivered and are kept by somebody are moved to ordinary memory with
        their content, and so are the storages of `candidates` that live in a place. What `numpy()`
        has made an array of stays: the array would not follow.

        Args:
            memory: 1-D uint8.
            candidates: Tensors that may live there.

        Returns:
            What still lives there.

        Raises:
            ValueError: the memory is not contiguous or on no device.
        """
        left = self._ops.vacate(self._table, memory, list(candidates))
        return [
            Lodger(memory[start : start + nbytes], bool(fixed))
            for start, nbytes, fixed in zip(left[::3], left[1::3], left[2::3], strict=True)
        ]

    def counters(self) -> Counters:
        """Return what became of all deliveries so far."""
        return Counters(*self._ops.counters(self._table))

    def unplaceable(self) -> list[str]:
        """Return the parameters that were given up, by name.

        Their gradients were no allocation of just their size several times in a row (a view of a
        larger one, shared, not contiguous, added to an older one), or were made elsewhere each
        time. They are copied to their places.
        """
        return [self.names[key] for key in self._ops.given_up(self._table)]

    def _report(self) -> None:
        fresh = [key for key in self._ops.given_up(self._table) if key not in self._reported]
        if fresh:
            self._reported.update(fresh)
            logger.info(
                "gradients that are copied to the pool, since their memory cannot be foreseen: %s",
                ", ".join(self.names[key] for key in fresh),
            )


def _ops() -> Any:
    load_allocator()
    return torch.ops.dmuon_allocator
