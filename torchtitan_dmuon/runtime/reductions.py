"""Gradients on their way: born in the pool, taken, summed (paper C.1)."""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchtitan_dmuon.comm import Event
from torchtitan_dmuon.runtime.group import Group
from torchtitan_dmuon.runtime.pool import Pool, Space
from torchtitan_dmuon.runtime.signatures import Counters, Lodger, Signatures

logger = logging.getLogger("torchtitan_dmuon")

# Reductions in flight whose packed gradients are kept; one more waits for the oldest.
_MAX_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class _Reduction:
    """Its end, what must stay alive until then, and whose it is."""

    event: Event
    packed: torch.Tensor
    group: Group


class Reductions:
    """Starts the reductions of a model's groups and waits for them, the oldest first.

    Args:
        groups: Of the model.
        pool: Where gradients lie, once it is open.
    """

    def __init__(self, groups: Sequence[Group], pool: Pool) -> None:
        self._groups = list(groups)
        self._pool = pool
        self._flying: deque[_Reduction] = deque()
        self._signatures: Signatures | None = None
        self._reported: set[Group] = set()
        self._keys: dict[Group, int] = {}
        at = 0
        for group in self._groups:
            self._keys[group] = at
            at += len(group.parameters)

    def learn(self, device: torch.device) -> None:
        """From now on, learn which allocations become gradients, and have them born in the pool."""
        if self._signatures is None:
            names = [entry.name for group in self._groups for entry in group.parameters]
            self._signatures = Signatures(names, device)

    def counters(self) -> Counters | None:
        """How many gradients were born in their places so far; None if none can be."""
        return self._signatures.counters() if self._signatures else None

    def begin_backward(self) -> None:
        """A backward begins, or another pass within one."""
        if self._signatures is not None:
            self._signatures.begin()

    def abort(self) -> None:
        """What an earlier backward left is void."""
        for group in self._groups:
            # What nobody holds is not released: a record would take it for in use until here.
            if not self._is_flying(group) and self._pool.held(_place(group)) is not None:
                self._pool.release(_place(group))

    def begin(self, group: Group) -> None:
        """Gradients of a group are about to be made, and will be summed: have its place free."""
        self._make_room(group)
        self._pool.acquire(_place(group))

    def enter(self, call: int, groups: Sequence[Group]) -> None:
        """Backward of a call of a layer begins: its gradients may be born in the groups' places."""
        if self._signatures is None:
            return
        # Invariant: nothing is born in a place that is being summed: what is not summed this time
        # has not waited for the last one's sum.
        given = [group for group in groups if not self._is_flying(group)]
        places = {
            self._keys[group] + index: memory
            for group in given
            for index, memory in group.gradient_places().items()
        }
        self._signatures.enter(call, places)

    def start(self, group: Group, *, sync: bool) -> None:
        """Take a group's gradients, and send them to their owners if `sync`."""
        in_place: frozenset[int] = frozenset()
        if sync:
            if self._pool.held(_place(group)) is None or self._is_flying(group):
                # A layer that was left out here has not begun.
                self.begin(group)
            in_place = self._deliver(group)
        elif self._signatures is not None:
            self._signatures.leave()
        copied = group.take_gradients(in_place)
        lodgers = self._lodgers(group, in_place) if sync else []
        sent = group.send_gradients(copied, sync=sync)
        if sent is not None:
            self._flying.append(_Reduction(*sent, group))
        elif not self._is_flying(group):
            self._pool.release(_place(group))
        if lodgers:
            self.finish()
            for memory, content in lodgers:
                memory.copy_(content)

    def bound(self) -> None:
        """Wait for the oldest if there are too many."""
        if len(self._flying) > _MAX_IN_FLIGHT:
            self._finish_one()

    def finish(self) -> None:
        """Wait for all of them."""
        while self._flying:
            self._finish_one()

    def close(self) -> None:
        """Learn nothing any more."""
        if self._signatures is not None:
            self._signatures.close()
            self._signatures = None

    def _is_flying(self, group: Group) -> bool:
        """Whether a sum of the group's gradients is on its way."""
        return any(reduction.group is group for reduction in self._flying)

    def _finish_one(self) -> None:
        done = self._flying.popleft()
        done.event.wait()
        self._pool.release(_place(done.group))

    def _deliver(self, group: Group) -> frozenset[int]:
        """Return the parameters whose gradients were born in the group's place."""
        if self._signatures is None:
            return frozenset()
        self._signatures.leave()
        first = self._keys[group]
        found = self._signatures.deliver(
            {first + i: group.parameters[i].parameter.grad for i in group.trainable()}
        )
        in_place = frozenset(key - first for key in found)
        for index in set(group.trainable()) - in_place:
            parameter = group.parameters[index].parameter
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided:
                continue
            if not gradient.untyped_storage().resizable():
                # It may have had to stay in another one's place, which is written next.
                parameter.grad = gradient.clone()
        return in_place

    def _lodgers(
        self, group: Group, in_place: frozenset[int]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Have what is written in a group's place free of tensors that somebody still uses.

        Returns:
            What cannot move, as (memory, its content): it is put back when the place is free again.
        """
        memory = self._pool.held(_place(group))
        if self._signatures is None or memory is None:
            return []
        written = [memory]
        if not group.overwrites:
            # Spares a copy: autograd itself still holds the gradient that came last.
            copied = [i for i in group.trainable() if i not in in_place]
            written = [place.view(torch.uint8) for place in group.gradient_parts(memory, copied)]
        # Gradients that a hook has kept move now.
        left = self._vacate(written)
        if not all(lodger.fixed for lodger in left):
            # In another order than the recorded one those of other layers may live there.
            held = [entry.parameter.grad for other in self._groups for entry in other.parameters]
            left = self._vacate(written, [g for g in held if g is not None])
        if not all(lodger.fixed for lodger in left):
            # A hook has kept what it replaced by another gradient.
            left = self._vacate(written, _tensors_in(memory))
        if left:
            self._report(group)
        return [(lodger.memory, lodger.memory.clone()) for lodger in left]

    def _vacate(
        self, stretches: Sequence[torch.Tensor], candidates: Sequence[torch.Tensor] = ()
    ) -> list[Lodger]:
        assert self._signatures is not None
        return [x for memory in stretches for x in self._signatures.vacate(memory, candidates)]

    def _report(self, group: Group) -> None:
        if group not in self._reported:
            self._reported.add(group)
            logger.info(
                "%s: something else is still used where its gradients are summed, and is put back "
                "behind every sum, which takes time: an array that numpy() made of a gradient, or "
                "an order of layers that was not recorded",
                group.name,
            )

    def _make_room(self, group: Group) -> None:
        """Have a group's place for itself: end the reductions that still read there."""
        place = _place(group)
        blocking = {index for _, index in self._pool.blocking(place)} | {group.index}
        while any(reduction.group.index in blocking for reduction in self._flying):
            self._finish_one()
        # What is left is of groups whose backward has begun and not ended: an order that was not
        # recorded. They begin anew when they are summed; their gradients go on in ordinary memory.
        for other in self._pool.blocking(place):
            memory = self._pool.held(other)
            if self._signatures is not None and memory is not None:
                # Nothing more is born there.
                self._signatures.vacate(memory)
            self._pool.release(other)


def _tensors_in(memory: torch.Tensor) -> list[torch.Tensor]:
    """Return all tensors of this process that live in `memory`. Takes a tenth of a second."""
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    return [
        thing
        for thing in gc.get_objects()
        # Plain ones: others, as fake tensors, have no memory to ask for.
        if type(thing) in (torch.Tensor, torch.nn.Parameter)
        and thing.device == memory.device
        and thing.layout is torch.strided
        and not torch._C._functorch.is_functorch_wrapped_tensor(thing)
        and begin <= thing.data_ptr() < end
    ]


def _place(group: Group) -> tuple[Space, int]:
    return Space.GRADIENTS, group.index
