"""QK-clip: query and key weights shrink where attention logits grow too large.

Muon's updates can make attention logits grow without bound. QK-clip (Kimi K2, arXiv:2507.20534,
section 2.1) looks at the largest logit S of each head in a step. Where S exceeds a threshold tau,
the head's query and key weights are multiplied by (tau / S)^balance and (tau / S)^(1 - balance)
after the update, so that the same input would now give tau. Heads below it are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from torchtitan_dmuon.arguments import expect, is_size
from torchtitan_dmuon.comm import Communicator
from torchtitan_dmuon.runtime.group import Group
from torchtitan_dmuon.runtime.layout import Segment

# Queries that are compared with all keys at once: bounds the memory of the observation.
_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a parameter (elements of a bias) that make queries or keys.

    Attributes:
        parameter: Canonical name.
        first: The first row.
        count: Rows.
        query: Whether they make queries; otherwise keys.
    """

    parameter: str
    first: int
    count: int
    query: bool


@dataclass(frozen=True, slots=True)
class Attention:
    """An attention module, and where the weights of its heads are.

    Attributes:
        name: Canonical name.
        inner: What is called with queries (batch, length, heads, size) and keys (batch, length, key
            heads, size) as they are multiplied: after rotary embedding.
        heads: For each key head the rows of that head and of the query heads that share it. They
            are clipped together, by the largest logit among them (one head each without sharing).
    """

    name: str
    inner: nn.Module
    heads: tuple[tuple[Rows, ...], ...]


class QKClip:
    """Observes attention logits, and clips query and key weights on their owners.

    Give it to an `OwnerOptimizer`. Logits are observed in training mode: of causal pairs, or of
    those that a boolean mask allows if the module gets one as `attention_masks`. That multiplies
    queries and keys a second time. The optimizer takes the largest over the micro-batches of a step
    and all ranks, clips after the update, and before new weights are published.

    Attributes:
        maximum: The largest logit of the last step, over all heads; 0-D float32.
        clipped: Key heads (with their query heads) that were clipped in it; 0-D.

    Args:
        attentions: Of the model.
        threshold: tau, above 0.
        balance: Share of the query weights, 0 to 1.

    Raises:
        ValueError: a value out of range, or no attention.
    """

    def __init__(
        self, attentions: Sequence[Attention], threshold: float = 100.0, balance: float = 0.5
    ) -> None:
        expect("threshold", threshold, lambda v: is_size(v) and v > 0, "a finite number > 0")
        expect("balance", balance, lambda v: is_size(v) and v <= 1, "a number from 0 to 1")
        expect("attentions", attentions, lambda v: len(v) > 0, "at least one")
        self.threshold = threshold
        self.balance = balance
        self.attentions = tuple(attentions)
        self.maximum = torch.tensor(0.0)
        self.clipped = torch.tensor(0)
        self._largest: list[torch.Tensor | None] = [None] * len(self.attentions)
        self._factors: torch.Tensor | None = None
        self._rows: dict[str, list[tuple[Rows, int]]] = {}
        position = 0
        for index, attention in enumerate(self.attentions):
            for rows in attention.heads:
                for part in rows:
                    self._rows.setdefault(part.parameter, []).append((part, position))
                position += 1
            attention.inner.register_forward_pre_hook(self._observer(index), with_kwargs=True)

    @property
    def parameters(self) -> Iterable[str]:
        """Canonical names of the parameters that may be clipped."""
        return self._rows.keys()

    def _observer(self, index: int) -> Any:
        def observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not module.training:
                return
            with torch.no_grad():
                mask, scale = kwargs.get("attention_masks"), kwargs.get("scale")
                mask = mask if isinstance(mask, torch.Tensor) else None
                found = largest_logits(args[0], args[1], scale=scale, mask=mask)
            old = self._largest[index]
            self._largest[index] = found if old is None else torch.maximum(old, found)

        return observe

    def forget(self) -> None:
        """Drop what was observed: the step that it belongs to does not count."""
        self._largest = [None] * len(self.attentions)
        self._factors = None

    def agree(self, communicator: Communicator | None, device: torch.device) -> None:
        """Turn what all ranks observed since the last call into factors. Collective."""
        unseen = float("-inf")
        parts = [
            torch.full((len(a.heads),), unseen, device=device) if found is None else found
            for a, found in zip(self.attentions, self._largest, strict=True)
        ]
        largest = torch.cat(parts)
        if communicator is not None:
            communicator.exchange(largest, maximum=True)
        self.forget()
        # Logits that are not finite say nothing; gradients will not be finite either.
        over = largest.isfinite() & (largest > self.threshold)
        self._factors = torch.where(over, self.threshold / largest, 1.0)
        self.maximum, self.clipped = largest.max(), over.sum()

    def scale(self, group: Group, piece: Iterable[Segment]) -> None:
        """Clip what this rank owns of a piece, in place."""
        assert self._factors is not None, "agree() comes first"
        for s in piece:
            entry = group.parameters[s.parameter]
            parts = self._rows.get(entry.name)
            if parts is None or not s.numel:
                continue
            width = entry.shape[1:].numel()
            # Owners and shards hold whole rows.
            first, count = s.start // width, s.numel // width
            factors = torch.ones(entry.shape[0], device=group.device)
            for part, head in parts:
                share = self.balance if part.query else 1 - self.balance
                factors[part.first : part.first + part.count] = self._factors[head] ** share
            here = factors[first : first + count, None]
            group.masters[s].view(count, width).mul_(here.to(group.masters[s].dtype))


def largest_logits(
    queries: torch.Tensor,
    keys: torch.Tensor,
    *,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the largest attention logit of each key head, over the query heads that share it.

    Args:
        queries: (batch, length, heads, size).
        keys: (batch, length, key heads, size); heads is a multiple of key heads.
        scale: Factor of the products; None: size^-0.5.
        mask: Boolean, broadcasts to (batch, 1, length, length): which pairs count. None: causal.

    Returns:
        (key heads,), float32.
    """
    batch, length, heads, size = queries.shape
    shared = keys.shape[2]
    q = queries.transpose(1, 2).reshape(batch, shared, heads // shared, length, size)
    k = keys.transpose(1, 2).unsqueeze(2).mT
    result = torch.full((shared,), float("-inf"), device=queries.device)
    positions = torch.arange(length, device=queries.device)
    for start in range(0, length, _CHUNK):
        end = min(start + _CHUNK, length)
        if mask is None:
            # Later keys are not looked at: no query of the chunk may attend to them.
            allowed = positions[start:end, None] >= positions[:end]
            logits = q[..., start:end, :] @ k[..., :end]
        else:
            allowed = mask[:, :, start:end].unsqueeze(2)
            logits = q[..., start:end, :] @ k
        logits = logits.float().masked_fill(~allowed, float("-inf"))
        result = torch.maximum(result, logits.amax(dim=(0, 2, 3, 4)))
    return result * (size**-0.5 if scale is None else scale)
