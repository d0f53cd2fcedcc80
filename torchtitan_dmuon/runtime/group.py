"""The memory of one group on one rank, and its way between freed and gathered.

A group is what is gathered and reduced together: the owned parameters of one layer. Its buffer
holds all of them in the compute dtype while the layer needs them; the model's parameters are views
of it. What a rank keeps between uses are the FP32 masters of what it owns and, where several rows
exist, the copies that its row gathers from.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn

from torchtitan_dmuon.comm import Communicator, Event
from torchtitan_dmuon.comm.streams import mark
from torchtitan_dmuon.ownership import Matrix
from torchtitan_dmuon.runtime.layout import Layout, Segment, align
from torchtitan_dmuon.runtime.pool import Pool, Space
from torchtitan_dmuon.runtime.publisher import Publisher
from torchtitan_dmuon.runtime.signatures import move_back, move_storage

Places = list[tuple[nn.Module, str]]


@dataclass(slots=True)
class OwnedParameter:
    """A parameter of a group, as every rank knows it.

    Attributes:
        name: Canonical fully qualified name.
        shape: Full shape.
        matrices: Its matrices; empty if it is updated elementwise.
        parameter: The object that the model has registered.
        places: Every (module, attribute) that it is registered at.
    """

    name: str
    shape: torch.Size
    matrices: tuple[Matrix, ...]
    parameter: nn.Parameter
    places: Places

    @property
    def numel(self) -> int:
        return self.shape.numel()


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a group.

    Attributes:
        master: What owners keep and update.
        compute: What the layer computes with and what is gathered and published.
        reduce: What gradients are summed in.
    """

    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


class GroupState(enum.Enum):
    FREED = enum.auto()
    """No buffer; the parameters are placeholders that read as NaN."""

    GATHERING = enum.auto()
    """The buffer is being filled; the parameters are still placeholders."""

    GATHERED = enum.auto()
    """The parameters are views of the filled buffer."""


class Group(ABC):
    """Parameters that are gathered and reduced together.

    Attributes:
        name: Canonical name of the layer.
        parameters: The owned parameters, in the model's order.
        layout: The table of the buffer.
        owned: Segments whose master this rank keeps, in buffer order.
        masters: 1-D master of each owned segment.
        gradients: 1-D reduced gradient of each owned segment, in the master dtype; empty before the
            first reduction after `zero_grad`.
        present: Names of the parameters that had a gradient on this rank since `zero_grad`.
        uses: Modules that are running and need the parameters.
        exposed: Whether `full_params` shows the parameters now.
        pieces: The segments of this column, in the portions that are updated and published.
    """

    # Whether this rank's row keeps a copy to gather from, apart from masters.
    has_copy: bool
    pieces: list[list[Segment]]

    def __init__(
        self,
        name: str,
        parameters: Sequence[OwnedParameter],
        layout: Layout,
        precision: Precision,
        communicator: Communicator | None,
        device: torch.device,
        gradient_scale: float,
    ) -> None:
        self.name = name
        self.parameters = list(parameters)
        self.layout = layout
        self.precision = precision
        self.communicator = communicator
        self.device = device
        self.gradient_scale = gradient_scale
        self.columns = communicator.mesh.columns if communicator else 1
        self.rows = communicator.mesh.rows if communicator else 1
        self.row = communicator.row if communicator else 0
        self.column = communicator.column if communicator else 0
        self.led = [s for s in layout.segments if s.column == self.column]
        self.owned = [s for s in self.led if s.row in (self.row, -1)]
        self.state = GroupState.FREED
        self.uses = 0
        self.exposed = False
        self.fired: set[int] = set()
        self.present: set[str] = set()
        self.gradients: dict[Segment, torch.Tensor] = {}
        self._unsynced: torch.Tensor | None = None
        self._kept: frozenset[int] = frozenset()
        self._gathering: Event | None = None
        self._everything = frozenset(range(len(self.parameters)))
        # Where every parameter is always resident: one column.
        self.resident = self.columns == 1
        self.masters: dict[Segment, torch.Tensor] = {}
        self.copies: dict[Segment, torch.Tensor] = {}
        # Line D only: where its memory may lie, and its number there.
        self.pool = Pool()
        self.index = -1
        # Line D: hands pieces on in place of broadcasts, once the pool is open.
        self.publisher: Publisher | None = None
        self._placed = False

    # -- memory ------------------------------------------------------------------------------

    def allocate(self) -> None:
        """Make masters, copies and buffer on `self.device`, with undefined content."""
        p = self.precision
        self._make_buffer()
        if self.resident:
            self.copies = {s: part(self.buffer, s.offset, s.numel) for s in self.led}
        else:
            self.copies = self._flat(self.led, p.compute) if self.has_copy else {}
        if self.copies and p.master == p.compute:
            # One storage serves both: the owner's copy is its master.
            self.masters = {s: self.copies[s] for s in self.owned}
        else:
            self.masters = self._flat(self.owned, p.master)
        self._placeholder = torch.full((), float("nan"), dtype=p.compute, device=self.device)
        self.state = GroupState.GATHERED if self.resident else GroupState.FREED
        for entry, view in zip(self.parameters, self.views, strict=True):
            self._install(entry, view if self.resident else self._placeholder.expand(entry.shape))

    def _make_buffer(self) -> None:
        dtype = self.precision.compute
        self.buffer = torch.empty(self.layout.numel, dtype=dtype, device=self.device)
        self.views = [
            part(self.buffer, offset, entry.numel).view(entry.shape)
            for offset, entry in zip(self.layout.offsets, self.parameters, strict=True)
        ]
        # After the views: a view of a storage without bytes cannot be made, but it can lose them.
        if not self.resident and self.device.type != "meta":
            self.buffer.untyped_storage().resize_(0)

    def _install(self, entry: OwnedParameter, data: torch.Tensor) -> None:
        """Point a parameter at `data`; a new object where the old one cannot follow (meta)."""
        old = entry.parameter
        if old.device.type == data.device.type:
            old.data = data
            return
        entry.parameter = nn.Parameter(data, requires_grad=old.requires_grad)
        for module, attribute in entry.places:
            module._parameters[attribute] = entry.parameter

    def move(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Follow `Module._apply(convert)`: to another device, with or without the content."""
        device = self.check_move(convert)
        if device == self.device:
            return
        old, self.device = self.masters, device
        self.allocate()
        with torch.no_grad():
            for s, master in old.items():
                self.masters[s].copy_(convert(master))

    def check_move(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> torch.device:
        """Return the device that `convert` moves to.

        Raises:
            TypeError: `convert` changes the dtype.
        """
        probe = convert(torch.empty(0, dtype=self.precision.master, device=self.device))
        if probe.dtype != self.precision.master:
            raise TypeError(
                f"{self.name}: owned parameters cannot be cast to {probe.dtype}; give param_dtype "
                f"to dedicate_params, masters stay {self.precision.master}"
            )
        return probe.device

    def _flat(self, segments: Sequence[Segment], dtype: torch.dtype) -> dict[Segment, torch.Tensor]:
        """Return a view for each segment of one new tensor, in buffer order, aligned."""
        starts, position = [], 0
        for s in segments:
            starts.append(position)
            position += align(s.numel)
        flat = torch.empty(position, dtype=dtype, device=self.device)
        return {s: part(flat, start, s.numel) for s, start in zip(segments, starts, strict=True)}

    def memory_bytes(self) -> dict[str, int]:
        """Return this rank's bytes by purpose: masters, copies, gradients, gathered, unsynced.

        What lies in the pool is not among them.
        """
        shared = {t.untyped_storage().data_ptr() for t in self.copies.values()}
        own = [t for t in self.masters.values() if t.untyped_storage().data_ptr() not in shared]
        elsewhere = not (self.resident or self._placed)
        return {
            "masters": _bytes(own),
            "copies": _bytes(t for t in self.copies.values() if not self.pool.contains(t)),
            "gradients": _bytes(t for t in self.gradients.values() if not self.pool.contains(t)),
            "gathered": self.buffer.untyped_storage().nbytes() if elsewhere else 0,
            "unsynced": 0 if self._unsynced is None else _bytes([self._unsynced]),
        }

    @torch.no_grad()
    def write(self, index: int, full: torch.Tensor) -> None:
        """Take the owned parts of parameter `index` from its full value, of any dtype."""
        flat = full.detach().reshape(-1)
        for s in self.owned:
            if s.parameter == index:
                self.masters[s].copy_(flat[s.start : s.start + s.numel])

    # -- gather ------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Start to fill the buffer, unless it is filled or being filled."""
        if self.state is not GroupState.FREED or self.resident:
            return
        place = self.pool.acquire((Space.PARAMETERS, self.index))
        if place is None:
            self.buffer.untyped_storage().resize_(self.buffer.numel() * self.buffer.element_size())
        else:
            # Not a new buffer: views that autograd saved in forward follow.
            move_storage(self.buffer, place, copy=False)
        self._placed = place is not None
        self._gathering = self._gather([mark(self.device)])
        self.state = GroupState.GATHERING

    def finish_gather(self) -> None:
        """Make the parameters usable: views of the filled buffer. Starts the gather if need be."""
        self.start_gather()
        if self.state is GroupState.GATHERED:
            self._wait_resident()
            return
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        self._wait_resident()
        for entry, view in zip(self.parameters, self.views, strict=True):
            entry.parameter.data = view
        self.state = GroupState.GATHERED

    def free(self) -> None:
        """Give the buffer up; the parameters become placeholders of the same shape and dtype."""
        if self.resident or self.state is GroupState.FREED:
            return
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        for entry in self.parameters:
            entry.parameter.data = self._placeholder.expand(entry.shape)
        storage = self.buffer.untyped_storage()
        if storage.resizable():
            # In the pool or not: it lets go of its memory.
            storage.resize_(0)
        else:
            # Somebody holds it from outside (`numpy()`): leave it to them, but never in the pool,
            # where others follow: views that autograd saved live on in it.
            if self._placed:
                move_back(self.buffer, copy=True)
            self._make_buffer()
        self.pool.release((Space.PARAMETERS, self.index))
        self.state = GroupState.FREED

    @abstractmethod
    def _gather(self, after: list[Event]) -> Event: ...

    @abstractmethod
    def gather_masters(self) -> torch.Tensor:
        """Return a buffer with all masters, in their dtype, on every rank. Collective; waits."""

    @property
    def exact(self) -> bool:
        """Whether the parameters, once gathered, have the masters' own dtype."""
        return self.precision.master == self.precision.compute

    def expose(self) -> None:
        """Show full parameters in the masters' dtype: `full_params`. Collective."""
        self.exposed = True
        if self.exact:
            self.uses += 1
            self.finish_gather()
            return
        whole = self.gather_masters()
        for offset, entry in zip(self.layout.offsets, self.parameters, strict=True):
            entry.parameter.data = part(whole, offset, entry.numel).view(entry.shape)

    def conceal(self) -> None:
        """End `expose`."""
        self.exposed = False
        if self.exact:
            self.uses -= 1
            if not self.uses:
                self.free()
            return
        gathered = self.state is GroupState.GATHERED
        for entry, view in zip(self.parameters, self.views, strict=True):
            entry.parameter.data = view if gathered else self._placeholder.expand(entry.shape)

    def _wait_resident(self) -> None:
        """Order the caller after what still writes to a resident buffer."""
        if self.resident:
            self.wait_for_publish()

    # -- gradients ---------------------------------------------------------------------------

    def trainable(self) -> list[int]:
        """Return the indices of the parameters that take gradients, or took some not yet summed."""
        entries = enumerate(self.parameters)
        return [i for i, e in entries if e.parameter.requires_grad or i in self._kept]

    def take_gradients(
        self, in_place: frozenset[int] = frozenset()
    ) -> dict[int, torch.Tensor | None]:
        """Take the parameters' gradients off the model.

        Args:
            in_place: Parameters whose gradients lie where they are summed already.

        Returns:
            By parameter, the gradients that have to be copied there; None where there is none.
        """
        self.fired.clear()
        copied: dict[int, torch.Tensor | None] = {}
        for index in self.trainable():
            entry = self.parameters[index]
            if entry.parameter.grad is not None:
                self.present.add(entry.name)
            if index not in in_place:
                copied[index] = entry.parameter.grad
            entry.parameter.grad = None
        return copied

    @torch.no_grad()
    def send_gradients(
        self, copied: dict[int, torch.Tensor | None], *, sync: bool
    ) -> tuple[Event, torch.Tensor] | None:
        """Bring gradients to where they are summed, and to their owners if `sync`.

        A parameter without a gradient contributes zero: which collectives run never depends on it.

        Args:
            copied: From `take_gradients`; it is emptied on the way.
            sync: Whether they are summed now.

        Returns:
            The end of the reduction and what must live until then; None if nothing was sent.
        """
        trainable = self.trainable()
        if not trainable:
            return None
        packed = self._gradient_memory(sync)
        # What was born in its place and has nothing to be added to it is there already.
        for index in trainable if self._unsynced is not None else list(copied):
            entry = self.parameters[index]
            place = part(packed, self.layout.offsets[index], entry.numel)
            if index in copied:
                gradient = copied.pop(index)
                if gradient is None:
                    place.zero_()
                else:
                    place.view(entry.shape).copy_(gradient)
                del gradient
            if self._unsynced is not None:
                place.add_(part(self._unsynced, self.layout.offsets[index], entry.numel))
        if not sync:
            # Nothing yet from a parameter that is unfrozen later: zero, not garbage.
            for index in self._everything.difference(trainable):
                offset = self.layout.offsets[index]
                part(packed, offset, self.parameters[index].numel).zero_()
            self._unsynced, self._kept = packed, frozenset(trainable)
            return None
        self._unsynced, self._kept = None, frozenset()
        event = self._reduce(packed, frozenset(trainable))
        return None if event is None else (event, packed)

    def _gradient_memory(self, sync: bool) -> torch.Tensor:
        """Return what is to hold all gradients of the group, (numel,) in the reduction's dtype."""
        place = self.pool.acquire((Space.GRADIENTS, self.index)) if sync else None
        if place is not None:
            return place.view(self.precision.reduce)
        return torch.empty(self.layout.numel, dtype=self.precision.reduce, device=self.device)

    @property
    def born_in_place(self) -> bool:
        """Whether gradients can be: they are summed in the dtype in which autograd makes them."""
        return self.precision.reduce is self.precision.compute

    @property
    def overwrites(self) -> bool:
        """Whether the next sum changes gradients that were born where they are summed."""
        return self._unsynced is not None

    def gradient_parts(self, memory: torch.Tensor, indices: Iterable[int]) -> list[torch.Tensor]:
        """Return the parts of the group's place that are some parameters'.

        Args:
            memory: The place, uint8.
            indices: Parameters.
        """
        flat, at = memory.view(self.precision.reduce), self.layout.offsets
        return [part(flat, at[i], self.parameters[i].numel) for i in indices]

    def gradient_places(self) -> dict[int, torch.Tensor]:
        """Return where gradients may be born, by parameter: in the pool, if the group's place
        there is in use and they are summed as autograd makes them."""
        if not self.born_in_place:
            return {}
        memory = self.pool.held((Space.GRADIENTS, self.index))
        if memory is None:
            return {}
        filled = [i for i in self.trainable() if self.parameters[i].numel]
        return dict(zip(filled, self.gradient_parts(memory, filled), strict=True))

    @abstractmethod
    def _reduce(self, packed: torch.Tensor, trainable: frozenset[int]) -> Event | None: ...

    def _accumulator(self, sources: Sequence[tuple[Segment, torch.Tensor]]) -> Callable[[], None]:
        """Return what adds the summed `sources`, scaled, to the reduced gradients."""
        plan = []
        for s, source in sources:
            fresh = s not in self.gradients
            if fresh:
                self.gradients[s] = self._gradient_of(s, source)
            plan.append((self.gradients[s], source, fresh))
        scale = self.gradient_scale

        def accumulate() -> None:
            with torch.no_grad():
                for target, source, fresh in plan:
                    if target is source:
                        target.mul_(scale)
                    elif fresh:
                        target.copy_(source).mul_(scale)
                    else:
                        target.add_(source.to(target.dtype), alpha=scale)

        return accumulate

    def _gradient_of(self, s: Segment, source: torch.Tensor) -> torch.Tensor:
        """Return the memory for a first reduced gradient that comes from `source`."""
        return torch.empty(s.numel, dtype=self.precision.master, device=self.device)

    def clear_gradients(self) -> None:
        """Forget reduced and unsynchronised gradients."""
        self.gradients.clear()
        self.present.clear()
        self._unsynced, self._kept = None, frozenset()

    # -- after an update ---------------------------------------------------------------------

    @abstractmethod
    def publish(self, piece: Sequence[Segment]) -> None:
        """Hand the new value of one of `pieces` on to whom the rows gather from.

        Called for each piece, in order, by every rank of the column, owner or not.
        """

    @abstractmethod
    def wait_for_publish(self) -> None:
        """Order the caller after all publishes so far."""


def part(flat: torch.Tensor, offset: int, numel: int) -> torch.Tensor:
    """Return a stretch of a flat tensor."""
    return flat[offset : offset + numel]


def _bytes(tensors: object) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)  # type: ignore[attr-defined]
