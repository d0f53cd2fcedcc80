"""One pass over all weights: matrices by their rule, all else by AdamW, each handed on at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from torchtitan_dmuon.baselines.gather import gathered_update
from torchtitan_dmuon.optim import owned_state
from torchtitan_dmuon.optim.adamw_rule import apply_adamw
from torchtitan_dmuon.optim.matrix_optimizer import MatrixOptimizer
from torchtitan_dmuon.optim.matrix_step import MatrixWork, batches, update_matrices
from torchtitan_dmuon.optim.qk_clip import QKClip
from torchtitan_dmuon.optim.report import PhaseClock
from torchtitan_dmuon.runtime.gradients import Gradients
from torchtitan_dmuon.runtime.group import Group, OwnedParameter
from torchtitan_dmuon.runtime.layout import Segment
from torchtitan_dmuon.runtime.runtime import Runtime

Options = dict[str, Any]
"""A parameter group of the optimizer."""


@dataclass
class UpdatePass:
    """What one step does once gradients are agreed on.

    Attributes:
        runtime: Of the model.
        algorithm: The matrix optimizer.
        param_groups: Of the optimizer.
        state: Of the optimizer, by parameter.
        gradients: The agreed facts.
        qk_clip: Has its factors; or None.
        clock: Is marked phase by phase.
    """

    runtime: Runtime
    algorithm: type[MatrixOptimizer]
    param_groups: Sequence[Options]
    state: Mapping[Any, dict[str, Any]]
    gradients: Gradients
    qk_clip: QKClip | None
    clock: PhaseClock

    def __post_init__(self) -> None:
        self._options = {p: g for g in self.param_groups for p in g["params"]}
        matrix = [g for g in self.param_groups if g["route"] == "matrix"]
        self._rules = {id(g): self.algorithm.of(g) for g in matrix}

    def run(self) -> int:
        """Update and publish everything, in forward order. Returns the matrices done here."""
        try:
            return self._update_all()
        except BaseException:
            # Whoever catches it and goes on must not wait for the rest of this step's publish.
            self.runtime.abandon_publish()
            raise

    def _update_all(self) -> int:
        count = 0
        for group in self.runtime.order:
            works = self._works(group)
            together = batches(w for several in works.values() for w in several)
            for piece in group.pieces:
                mine = piece[0] in group.masters
                if mine:
                    for work in (w for s in piece for w in works.get(s, ())):
                        if not work.done:
                            update_matrices(together[work])
                        count += 1
                    if self.runtime.mode == "gather":
                        count += self._update_gathered(group, piece)
                    self.clock.mark("orthogonalize")
                    self._update_small(group, piece)
                    if self.qk_clip is not None:
                        self.qk_clip.scale(group, piece)
                    self.clock.mark("elementwise")
                group.publish(piece)
                if mine:
                    self.clock.mark("publish")
            self._note(together)
        self._update_sharded()
        self.clock.mark("elementwise")
        return count

    def _note(self, works: Iterable[MatrixWork]) -> None:
        """Have the next step's exchange say whose update was not finite."""
        self.runtime.suspects += [(work.matrix.parameter, work.finite) for work in works]

    def _due(
        self, group: Group, piece: Sequence[Segment]
    ) -> Iterator[tuple[Segment, OwnedParameter, Options]]:
        """Yield the segments of a piece here that are to be updated, with parameter and options.

        Those without a gradient anywhere are left alone, as torch leaves them alone.
        """
        for s in piece:
            entry = group.parameters[s.parameter]
            options = self._options.get(entry.parameter)
            present = entry.name in self.gradients.present and s in group.gradients
            if options is not None and present:
                yield s, entry, options

    def _works(self, group: Group) -> dict[Segment, list[MatrixWork]]:
        """Return the matrices of a group that this rank updates, by segment, in forward order."""
        owned = [s for piece in group.pieces for s in piece if s in group.masters and s.matrices]
        result: dict[Segment, list[MatrixWork]] = {}
        for s, entry, options in self._due(group, owned):
            rule, state = self._rules[id(options)], self.state[entry.parameter]
            result[s] = []
            for matrix in s.matrices:
                own = owned_state.of_matrix(rule, entry, s, matrix, state)
                work = MatrixWork(matrix, group.masters[s], group.gradients[s], s.start, own, rule)
                result[s].append(work)
        return result

    def _update_gathered(self, group: Group, piece: Sequence[Segment]) -> int:
        """Update the shards of a piece (line B). Returns the matrices done."""
        count = 0
        for s, entry, options in self._due(group, piece):
            if entry.matrices:
                momentum = self.state[entry.parameter]["momentum_buffer"].view(-1)
                works = gathered_update(group, s.parameter, momentum, self._rules[id(options)])
                self._note(works)
                count += len(works)
        return count

    def _update_small(self, group: Group, piece: Sequence[Segment]) -> None:
        """Update the tensors of a piece that are not matrices, group of options by group."""
        small: dict[int, list[tuple[Segment, nn.Parameter]]] = {}
        chosen: dict[int, Options] = {}
        for s, entry, options in self._due(group, piece):
            if not entry.matrices:
                small.setdefault(id(options), []).append((s, entry.parameter))
                chosen[id(options)] = options
        for key, members in small.items():
            states = [self.state[parameter] for _, parameter in members]
            apply_adamw(
                [group.masters[s] for s, _ in members],
                [group.gradients[s] for s, _ in members],
                [state["exp_avg"].view(-1) for state in states],
                [state["exp_avg_sq"].view(-1) for state in states],
                [state["step"] for state in states],
                chosen[key],
            )

    def _update_sharded(self) -> None:
        """Update what `fully_shard` holds, and parameters outside the layers in one process."""
        owned = {e.parameter for g in self.runtime.groups for e in g.parameters}
        for options in self.param_groups:
            members = [p for p in options["params"] if p not in owned and p.grad is not None]
            if options["route"] == "adamw" and members:
                states = [self.state[p] for p in members]
                apply_adamw(
                    [_local(p) for p in members],
                    [_local(p.grad) for p in members],
                    [_local(state["exp_avg"]) for state in states],
                    [_local(state["exp_avg_sq"]) for state in states],
                    [_local(state["step"]) for state in states],
                    options,
                )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
