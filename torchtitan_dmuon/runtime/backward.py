"""One backward pass: a fixed sequence of gathers and reductions, whatever autograd reaches.

A forward pass records its calls; backward visits them in reverse, as stages. The sequence of
collectives follows from that record alone:

    gather stages 0 .. d, reduce 0, gather d + 1, reduce 1, ...        (prefetch depth d)

Hooks only say how far backward has come. A stage that backward skips on this rank (its output was
not used here, its loss was dropped) is run through all the same, with zero gradients, because the
other ranks run it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from torchtitan_dmuon.runtime.group import Group
from torchtitan_dmuon.runtime.site import Site


@dataclass(eq=False, slots=True)
class Pass:
    """One forward pass of the model.

    Attributes:
        calls: The sites that ran with gradients enabled, in order of completion.
        sync: Whether gradients are to be reduced after its backward.
        number: Forward passes of the model before it.
    """

    calls: list[Site] = field(default_factory=list)
    sync: bool = True
    number: int = 0

    def groups(self) -> set[Group]:
        return {g for site in self.calls for g in site.groups}


class BackwardRun:
    """The stages of one pass's backward.

    Args:
        record: The pass.
        depth: Stages whose gathers are started ahead of the current one.
        begin_group: Is told that gradients of a group are about to be made.
        finish_group: Takes a group's gradients, starts its reduction and frees it.
    """

    def __init__(
        self,
        record: Pass,
        depth: int,
        begin_group: Callable[[Group], None],
        finish_group: Callable[[Group], None],
    ) -> None:
        self.record = record
        self.stages = list(reversed(record.calls))
        self._depth = depth
        self._begin_group = begin_group
        self._finish_group = finish_group
        self._begun: set[Group] = set()
        # A group that is used several times is finished at its last use in backward order.
        self.last: list[list[Group]] = [[] for _ in self.stages]
        seen: set[Group] = set()
        for k in reversed(range(len(self.stages))):
            for group in self.stages[k].groups:
                if group not in seen:
                    seen.add(group)
                    self.last[k].append(group)
        self._gathered = self._entered = self._finished = -1

    def enter(self, stage: int) -> bool:
        """Backward of a stage begins: finish those before it, have its groups gathered.

        Returns:
            Whether it does. A layer that hands its input through is told of by the layer before
            it, too late: it was finished then.
        """
        if stage <= self._finished:
            return False
        self._finish_through(stage - 1)
        self._entered = max(self._entered, stage)
        self._gather_through(stage + self._depth)
        for group in self.stages[stage].groups:
            if group not in self._begun:
                self._begun.add(group)
                self._begin_group(group)
        self.wait(stage)
        return True

    def recompute(self, site: Site) -> bool:
        """The forward of `site` runs again inside backward: have its groups gathered.

        Stages before it are not finished: recomputation may run ahead of their gradients.

        Returns:
            Whether the site is part of this run and not finished.
        """
        for stage in range(self._finished + 1, len(self.stages)):
            if self.stages[stage] is site:
                self._gather_through(stage)
                self.wait(stage)
                return True
        return False

    def wait(self, stage: int) -> None:
        for group in self.stages[stage].groups:
            group.finish_gather()

    def advance(self) -> None:
        """Finish the entered stages whose gradients are complete."""
        while self._finished < self._entered and self._complete(self._finished + 1):
            self._finish_through(self._finished + 1)

    def finish(self) -> None:
        """Run through what is left."""
        self._finish_through(len(self.stages) - 1)

    def _complete(self, stage: int) -> bool:
        groups = [g for g in self.last[stage] if g.trainable()]
        if not groups:
            # Nothing tells when backward has left a frozen layer, except that it entered another.
            return stage < self._entered
        # With a frozen parameter the layer may still need its weights after the last gradient.
        return all(len(g.fired) == len(g.parameters) for g in groups)

    def _finish_through(self, stage: int) -> None:
        for k in range(self._finished + 1, stage + 1):
            self._gather_through(k + self._depth)
            self._finished = k
            for group in self.last[k]:
                self._finish_group(group)

    def _gather_through(self, stage: int) -> None:
        for k in range(self._gathered + 1, min(stage + 1, len(self.stages))):
            self._gathered = k
            for group in self.stages[k].groups:
                group.start_gather()


def in_backward() -> bool:
    """Return whether autograd runs a backward on this thread."""
    return torch._C._current_graph_task_id() != -1
