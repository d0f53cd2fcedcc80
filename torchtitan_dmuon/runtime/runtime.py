"""The runtime of one model on one rank: what happens around each forward, backward and update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_flatten

from torchtitan_dmuon.comm import CommunicationError, Communicator, Traffic
from torchtitan_dmuon.optim.matrix_optimizer import MatrixOptimizer
from torchtitan_dmuon.ownership import Assignment, Layer
from torchtitan_dmuon.runtime.backward import BackwardRun, Pass, in_backward
from torchtitan_dmuon.runtime.fsdp import forward_order, leave_out_backward
from torchtitan_dmuon.runtime.group import Group, GroupState
from torchtitan_dmuon.runtime.pool import Pool, Record
from torchtitan_dmuon.runtime.publisher import Publisher
from torchtitan_dmuon.runtime.reductions import Reductions
from torchtitan_dmuon.runtime.signatures import Counters
from torchtitan_dmuon.runtime.site import Site, canonical_name

logger = logging.getLogger("torchtitan_dmuon")

# Forwards in training mode that may wait for their backward; each costs a reduction at the step.
_MAX_PENDING = 1000


class Runtime:
    """Gathers, reduces and publishes the groups of one model as its modules run.

    Attributes:
        model: The model.
        sites: The model's site first, then those with groups, in module order.
        groups: Every group, in module order.
        order: Every group in the order of the first forward; module order until then.
        layers: What the assignment was made from, by group.
        assignment: Who owns what.
        algorithm: The matrix optimizer that owners are balanced for.
        communicator: None if there is one rank.
        sync: Whether the next backward reduces gradients (`no_sync`).
        traffic: Counts of communication.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        groups: Sequence[Group],
        *,
        layers: Sequence[Layer],
        assignment: Assignment,
        mode: str,
        algorithm: MatrixOptimizer,
        communicator: Communicator | None,
        device: torch.device,
        reshard_after_forward: bool,
        prefetch_depth: int,
        cast_inputs_to: torch.dtype | None,
        open_pool: Callable[[Runtime, Record | None], bool] | None = None,
        allocation_signatures: bool = True,
    ) -> None:
        self.model = model
        self.sites = list(sites)
        self.groups = list(groups)
        self.order = list(groups)
        self.layers = tuple(layers)
        self.assignment = assignment
        self.mode = mode
        self.algorithm = algorithm
        self.communicator = communicator
        self.device = device
        self.sync = True
        self.traffic = communicator.traffic if communicator else Traffic()
        # Changes with every backward; what was found of the gradients is kept by it.
        self.gradient_version = 0
        self.known_gradients: tuple[int, Any] | None = None
        # Of the last step's updates here: the parameter, and whether the update was finite (0-D).
        self.suspects: list[tuple[str, torch.Tensor]] = []
        self._reshard = reshard_after_forward
        self._depth = prefetch_depth
        self._cast = cast_inputs_to
        self._nesting = 0
        # The layers in the order of the first forward (until then: of the modules), and how far
        # the present one has come in it.
        self._route = [site for site in self.sites if site.groups]
        self._reached: int | None = None
        # The present forward: each site, and whether it really ran.
        self._trace: list[tuple[Site, bool]] = []
        self._position: dict[Group, int] = {}
        self._passes = 0
        self._current = Pass()
        self._pending: list[Pass] = []
        self._runs: dict[Pass, BackwardRun] = {}
        self._task = -1
        # Line D: where groups lie, once it is open, and what opens it.
        self.pool = Pool()
        self._open_pool = open_pool
        self._signatures = allocation_signatures
        self._abandoned = False
        self._warm = False
        self._reductions = Reductions(self.groups, self.pool)
        for index, group in enumerate(self.groups):
            group.pool, group.index = self.pool, index
        self._watched: set[nn.Parameter] = set()
        # Copies that do not follow from their masters: new, moved or loaded weights.
        self._stale = True
        # Counts moves to another device, which may replace parameter objects.
        self.moves = 0

    # -- forward -----------------------------------------------------------------------------

    def enter(self, site: Site, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A site is about to run: have its groups gathered, and the next ones started."""
        if in_backward():
            self._enter_again(site)
            return site.cast_inputs(self._cast, args, kwargs)
        if self._nesting == 0:
            self._begin_pass(site)
        self._nesting += 1
        if site.groups:
            self._pass_over_to(site)
            self._bring_in(site, runs=True)
        return site.cast_inputs(self._cast, args, kwargs)

    def _bring_in(self, site: Site, *, runs: bool) -> None:
        for group in site.groups:
            if group.exposed and not group.exact:
                raise RuntimeError(
                    f"{site.name or 'the model'} runs inside full_params, where its weights have "
                    f"{group.precision.master} and not {group.precision.compute}"
                )
            group.uses += 1
            group.start_gather()
        self._prefetch(site)
        for group in site.groups:
            group.finish_gather()
            self._watch(group)
        self._trace.append((site, runs))

    def _pass_over_to(self, site: Site | None) -> None:
        """Take part in the gathers of the layers that this forward leaves out, up to `site`.

        Other ranks may run them: whether a layer runs may depend on a rank's data, but not which
        collectives run. A layer that is left out on every rank is gathered in vain.
        """
        if self._reached is None:
            return
        rest = self._route[self._reached :]
        if site is not None and site not in rest:
            return  # Called more often than in the first forward: as on every rank.
        left_out = rest if site is None else rest[: rest.index(site)]
        self._reached += len(left_out) + (site is not None)
        for other in left_out:
            self._bring_in(other, runs=False)
            if torch.is_grad_enabled():
                self._current.calls.append(other)
            self._let_go(other, keep=torch.is_grad_enabled() and not self._reshard)

    def _let_go(self, site: Site, *, keep: bool) -> None:
        for group in site.groups:
            group.uses -= 1
            if not group.uses and not keep:
                group.free()

    def leave(self, site: Site, outputs: Any) -> Any:
        """A site has run: free its groups, or see to it that backward finds them."""
        if in_backward():
            return outputs
        keep = False
        if torch.is_grad_enabled() and site.groups:
            self._current.calls.append(site)
            index = len(self._current.calls) - 1
            visible = self._on_backward(self._current, index, outputs)
            # Backward may come along a path that the outputs do not show: never free under it.
            keep = not self._reshard or not visible
        self._let_go(site, keep=keep)
        if self._nesting == 1 and site is self.sites[0]:
            self._pass_over_to(None)
        self._nesting -= 1
        if self._nesting == 0:
            self._end_pass(site)
        return outputs

    def fail(self) -> None:
        """A site raised: forget the pass, so that the next one starts clean."""
        if in_backward():
            return
        self._nesting = 0
        self._trace = []
        self._current = Pass()
        for group in self.groups:
            group.uses = 0
            group.free()

    def _begin_pass(self, outermost: Site) -> None:
        self._check_whole()
        self._passes += 1
        self._current = Pass(sync=self.sync, number=self._passes)
        self._trace = []
        self._reached = 0 if outermost is self.sites[0] else None
        if self._stale:
            self.publish_all()
        if self._open_pool is not None and torch.is_grad_enabled() and self.sync:
            # The first micro-batch only warms up (paper C.1).
            if self._warm:
                self.pool.record()
                if self._signatures and any(group.born_in_place for group in self.groups):
                    self._reductions.learn(self.device)
            self._warm = True

    def open_pool(self) -> None:
        """Open the pool once a micro-batch was recorded. Collective; between settle and update."""
        if self._open_pool is not None and self._open_pool(self, self.pool.recorded):
            self._open_pool = None

    def close_pool(self) -> None:
        """Do without a pool from now on."""
        self._open_pool = None
        self.pool.close()
        self._reductions.close()

    def _end_pass(self, outermost: Site) -> None:
        if outermost is self.sites[0] and not self._position:
            ran = {site for site, runs in self._trace if runs}
            idle = [site.name for site in self.sites if site.groups and site not in ran]
            if idle:
                logger.warning(
                    "layers that the first forward did not call: %s; if their weights are used in "
                    "another way they read as NaN there: choose other layers with "
                    "hook_boundary_predicate",
                    ", ".join(idle),
                )
            self._route = [site for site, runs in self._trace if runs or site not in ran]
            seen = [group for site in self._route for group in site.groups]
            self.order = list(dict.fromkeys([*seen, *self.groups]))
            self._position = {group: i for i, group in enumerate(self.order)}
        record, self._current, self._trace = self._current, Pass(), []
        # A forward in eval mode is not expected to be followed by a backward on some rank.
        if record.calls and outermost.module.training:
            self._pending.append(record)
            if len(self._pending) > _MAX_PENDING:
                raise RuntimeError(
                    f"{_MAX_PENDING} forwards in training mode without a backward or a step; run "
                    "them under torch.no_grad() or after model.eval()"
                )
        needed = (
            set[Group]() if self._reshard else set().union(*(p.groups() for p in self._pending))
        )
        held = needed | record.groups()
        for group in self.groups:
            # Prefetched for nothing, or used without gradients.
            if group not in held and not group.uses:
                group.free()

    def _prefetch(self, site: Site) -> None:
        if not site.groups or not self._position:
            return
        start = self._position[site.groups[0]] + 1
        for group in self.order[start : start + self._depth]:
            group.start_gather()

    # -- backward ----------------------------------------------------------------------------

    def _on_backward(self, record: Pass, index: int, outputs: Any) -> bool:
        """Be told when backward reaches a call's outputs. Returns whether they show tensors.

        Not whether those need gradients, which may differ between ranks.
        """
        visible = False

        def reached(gradient: torch.Tensor) -> None:
            run = self._run(record)
            self._finish_newer(record)
            # Invariant: places are given to the layer whose backward begins, and to no other: those
            # of a finished layer are being summed.
            if not run.enter(len(run.stages) - 1 - index):
                return
            # Several passes in one backward: autograd may still add to what one of them has made.
            alone = self._pending == [record]
            self._reductions.enter(index, record.calls[index].groups if alone else ())

        for value in tree_flatten(outputs)[0]:
            if isinstance(value, torch.Tensor):
                visible = True
                if value.requires_grad:
                    value.register_hook(reached)
        return visible

    def _finish_newer(self, record: Pass) -> None:
        """One backward of several passes takes them one by one, the newest first, on every rank."""
        for newer in sorted(self._runs, key=lambda p: -p.number):
            if newer.number > record.number:
                self._runs[newer].finish()

    def _watch(self, group: Group) -> None:
        """Be told when a parameter's gradient is complete."""
        for index, entry in enumerate(group.parameters):
            parameter = entry.parameter
            if not parameter.requires_grad or parameter in self._watched:
                continue
            self._watched.add(parameter)

            def done(_: torch.Tensor, group: Group = group, index: int = index) -> None:
                group.fired.add(index)
                for run in self._runs.values():
                    run.advance()

            parameter.register_post_accumulate_grad_hook(done)

    def _run(self, record: Pass) -> BackwardRun:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            # The first call of this backward; what an aborted one left is void.
            self._runs.clear()
            self._task = task
            self._reductions.abort()
            for group in self.groups:
                group.fired.clear()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        run = self._runs.get(record)
        if run is None:
            record.sync = self.sync
            self._reductions.begin_backward()
            run = self._runs[record] = self._new_run(record)
        return run

    def _new_run(self, record: Pass) -> BackwardRun:
        def begin(group: Group) -> None:
            if record.sync:
                self._reductions.begin(group)

        def finish(group: Group) -> None:
            self.gradient_version += 1
            self._reductions.start(group, sync=record.sync)
            group.free()
            self._reductions.bound()

        return BackwardRun(record, self._depth, begin, finish)

    def _enter_again(self, site: Site) -> None:
        """Activation recomputation: the forward of a site inside a backward (paper C.4)."""
        if not site.groups:
            return
        if not any(run.recompute(site) for run in self._runs.values()):
            raise NotImplementedError(
                f"{site.name or 'the model'} runs inside a backward that its own forward was not "
                "recorded for; use torch.utils.checkpoint with use_reentrant=False"
            )

    # Runs outside of autograd's own ranges: its name says in traces that backward ends here.
    @torch.profiler.record_function("dmuon end of backward")
    def _end_backward(self) -> None:
        for record, run in sorted(self._runs.items(), key=lambda item: -item[0].number):
            run.finish()
            if record in self._pending:
                self._pending.remove(record)
        self._runs.clear()
        self._task = -1
        for group in self.groups:
            late = [e.name for e in group.parameters if e.parameter.grad is not None]
            if late:
                raise RuntimeError(
                    f"{', '.join(late)}: a gradient came after those of {group.name} were reduced; "
                    f"an owned parameter may only be used inside a call of {group.name}"
                )

    def drop_backward(self) -> None:
        """Take part in the collectives of backwards that this rank did not run, with zeros."""
        sharded = forward_order(self.model) if self._pending else []
        for record in list(self._pending):
            run = self._new_run(record)
            # Both at once: on the other ranks the layers of one come between those of the other.
            with leave_out_backward(self.model, sharded):
                run.finish()
            self._pending.remove(record)

    # -- update ------------------------------------------------------------------------------

    def settle(self) -> None:
        """Have all gradients at their owners: the end of the backwards of this step."""
        self.drop_backward()
        self._reductions.finish()
        # Before the step's exchange: so no rank publishes while another's last round still runs.
        if self.publisher is not None:
            self.publisher.finish()

    @property
    def publisher(self) -> Publisher | None:
        """What hands pieces on, once the pool is open."""
        return next((group.publisher for group in self.groups if group.publisher), None)

    def free_all(self) -> None:
        """Give up every gathered buffer, and let no publish still read what is about to change."""
        for group in self.groups:
            if group.state is not GroupState.FREED:
                group.free()
            group.wait_for_publish()

    def publish_all(self) -> None:
        """Bring every copy to the value of its master. Collective."""
        if self.pool.ranges is not None and self.communicator is not None:
            # Invariant: the last round has ended on every rank; some may have nothing to publish.
            if self.publisher is not None:
                self.publisher.finish()
            self.communicator.exchange(torch.zeros(1, device=self.device))
        for group in self.order:
            for piece in group.pieces:
                group.publish(piece)
        self._stale = False

    def abandon_publish(self) -> None:
        """An update failed midway: if its publish is one call for all, nothing goes on."""
        self._abandoned = self.pool.ranges is not None
        if self.publisher is not None:
            self.publisher.abandon()

    def _check_whole(self) -> None:
        """Before anybody waits: of ranks that see it one by one the others would wait in vain."""
        if self._abandoned:
            raise CommunicationError("an update failed midway: its weights were not published")

    def wait_for_publish(self) -> None:
        for group in self.groups:
            group.wait_for_publish()

    def zero_grad(self) -> None:
        # Reductions in flight write to tensors that are dropped here.
        self.gradient_version += 1
        for group in self.groups:
            group.clear_gradients()
            for entry in group.parameters:
                entry.parameter.grad = None

    def mark_stale(self) -> None:
        """Masters were written: copies follow before the next forward."""
        self._stale = True
        self.free_all()

    # -- the rest ----------------------------------------------------------------------------

    def owned_parameters(self) -> set[nn.Parameter]:
        """Return the parameters that have owners, as the model has them registered now."""
        return {e.parameter for g in self.groups for e in g.parameters}

    def other_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the model's parameters without owners, with canonical names."""
        owned = self.owned_parameters()
        for name, parameter in self.model.named_parameters():
            if parameter not in owned:
                yield canonical_name(name), parameter

    def move(self, group: Group, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Follow `Module._apply` of a site's module."""
        group.move(convert)
        if group.device != self.device:
            self.device = group.device
            self._watched.clear()
            self._stale = True
            self.moves += 1
            if self.pool.ranges is not None:
                self.close_pool()

    @contextmanager
    def gathered(self, groups: Sequence[Group], *, writeback: bool) -> Iterator[None]:
        """Hold full parameters for a while; see `full_params`."""
        self._check_whole()
        if self._stale:
            self.publish_all()
        for group in groups:
            if group.exact:
                group.start_gather()
        for group in groups:
            group.expose()
        try:
            yield
        finally:
            for group in groups:
                if writeback:
                    for index, entry in enumerate(group.parameters):
                        group.write(index, entry.parameter)
                group.conceal()
            if writeback:
                self.mark_stale()

    def hit_counters(self) -> Counters | None:
        """Return how many gradients were born in the pool; None if none can be."""
        return self._reductions.counters()

    def memory_bytes(self) -> dict[str, int]:
        """Return this rank's bytes by purpose (`Group.memory_bytes`), and those of the pool."""
        total = {"pool": self.pool.nbytes}
        for group in self.groups:
            for key, value in group.memory_bytes().items():
                total[key] = total.get(key, 0) + value
        return total
