"""A small runtime around `Signatures`, and small models whose gradients are made in all ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from torchtitan_dmuon.runtime.signatures import PLACE_ALIGNMENT, Signatures

CPU = torch.device("cpu")
WIDTH = 24


def aligned_memory(size: int) -> torch.Tensor:
    """Return uint8 memory of `size` bytes, full of ones, at a multiple of 64 bytes."""
    whole = torch.full((size + PLACE_ALIGNMENT,), 0xFF, dtype=torch.uint8)
    start = -whole.data_ptr() % PLACE_ALIGNMENT
    return whole[start : start + size]


def lay_out(
    parameters: list[nn.Parameter], memory: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Return a place for each parameter's gradient, one behind the other."""
    memory = aligned_memory(_bytes(parameters)) if memory is None else memory
    places, position = [], 0
    for p in parameters:
        size = p.numel() * p.element_size()
        places.append(memory[position : position + size].view(p.dtype))
        position += _padded(size)
    return places


def _padded(size: int) -> int:
    return -(-size // PLACE_ALIGNMENT) * PLACE_ALIGNMENT


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(_padded(p.numel() * p.element_size()) for p in parameters)


def bytes_of(place: torch.Tensor) -> torch.Tensor:
    return place.view(torch.uint8)


def inputs(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A batch whose shape changes from one micro-batch to the next."""
    torch.manual_seed(1000 + seed)
    return torch.randn(1 + seed % 3, 5 + seed % 2, WIDTH).to(dtype)


class Rig:
    """Takes the gradients of a model as the runtime does, layer by layer.

    Args:
        model: Its children are the layers; a parameter belongs to the first that has it.
        one_range: Every layer's gradients have their places in the same memory.
    """

    def __init__(self, model: nn.Module, *, one_range: bool = False) -> None:
        self.model = model
        named = dict(model.named_parameters())
        self.names = list(named)
        self.parameters = list(named.values())
        self.signatures = Signatures(self.names, CPU)
        self.layers = list(model.children())
        self.owned: dict[nn.Module, list[int]] = {}
        self.used: dict[nn.Module, list[int]] = {}
        seen: set[nn.Parameter] = set()
        for layer in self.layers:
            own = set(layer.parameters())
            self.used[layer] = [i for i, p in enumerate(self.parameters) if p in own]
            self.owned[layer] = [i for i in self.used[layer] if self.parameters[i] not in seen]
            seen.update(own)
        groups = list(self.owned.values()) if one_range else [list(range(len(self.parameters)))]
        memory = aligned_memory(max(_bytes(self.parameters[i] for i in keys) for keys in groups))
        self.places: dict[int, torch.Tensor] = {}
        for keys in groups:
            self.places.update(
                zip(keys, lay_out([self.parameters[i] for i in keys], memory), strict=True)
            )
        self.learn_only = False
        self.taken: dict[str, torch.Tensor | None] = {}
        self._calls: list[nn.Module] = []
        self._fired: set[int] = set()
        for layer in self.layers:
            layer.register_forward_hook(self._ran)
        for key, parameter in enumerate(self.parameters):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._done(key))

    def step(self, loss: Callable[[], torch.Tensor], seed: int) -> None:
        """Run one micro-batch; `taken` has its gradients afterwards."""
        torch.manual_seed(seed)
        self._calls = []
        value = loss()
        self.taken, self._fired = {}, set()
        self.signatures.begin()
        value.backward()
        for layer in self.layers:
            self._take(layer)

    def _ran(self, layer: nn.Module, _args: object, output: torch.Tensor) -> None:
        index = len(self._calls)
        self._calls.append(layer)
        if not output.requires_grad:
            return

        def reached(_: torch.Tensor) -> None:
            keys = () if self.learn_only else self.used[layer]
            untaken = {k: self.places[k] for k in keys if self.names[k] not in self.taken}
            self.signatures.enter(index, untaken)

        output.register_hook(reached)

    def _done(self, key: int) -> Callable[[torch.Tensor], None]:
        def done(_: torch.Tensor) -> None:
            self._fired.add(key)
            for layer, keys in self.owned.items():
                if key in keys and self._fired.issuperset(keys):
                    self._take(layer)

        return done

    def _take(self, layer: nn.Module) -> None:
        keys = [key for key in self.owned[layer] if self.names[key] not in self.taken]
        if not keys:
            return
        self.signatures.leave()
        in_place = self.signatures.deliver({key: self.parameters[key].grad for key in keys})
        for key in keys:
            parameter, place = self.parameters[key], self.places[key]
            if parameter.grad is None:
                self.taken[self.names[key]] = None
                continue
            if key in in_place:
                assert parameter.grad.data_ptr() == place.data_ptr()
            else:
                assert not self.signatures.vacate(place.view(torch.uint8))
                place.view(parameter.shape).copy_(parameter.grad.to_dense())
            self.taken[self.names[key]] = place.view(parameter.shape).clone()
            parameter.grad = None


def gradients_of(
    model: nn.Module, loss: Callable[[], torch.Tensor], seed: int
) -> dict[str, torch.Tensor | None]:
    """Return what plain autograd computes, with the same random numbers."""
    torch.manual_seed(seed)
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss(), list(parameters.values()), allow_unused=True)
    return dict(zip(parameters, found, strict=True))


class Residual(nn.Module):
    """Attention and MLP with a norm whose weight's gradient comes from a cast."""

    def __init__(self, dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = CastNorm(dtype)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=True, dtype=dtype)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=dtype)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=dtype)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).unbind(-3)
        q, k, v = (t.transpose(-2, -3) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2)
        x = x + F.dropout(self.out(y), self.dropout)
        return x + F.dropout(self.down(F.silu(self.up(self.norm(x)))), self.dropout)


class CastNorm(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (wide * self.weight.float()).to(x.dtype)


class Checkpointed(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Twice(nn.Module):
    """One weight used twice within a layer: autograd sums two gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(F.linear(x, self.weight)), self.weight)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.gelu(self.inner(x)).float()


class Odd(nn.Module):
    """Gradients that are views, expanded, shared, transposed or sparse, beside an ordinary one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH // 2))
        self.second = nn.Parameter(torch.randn(WIDTH // 2))
        self.transposed = nn.Parameter(torch.randn(8, WIDTH).t())
        self.expanded = nn.Parameter(torch.randn(WIDTH, 8))
        self.same_a = nn.Parameter(torch.randn(4, WIDTH))
        self.same_b = nn.Parameter(torch.randn(4, WIDTH))
        self.table = nn.Embedding(10, WIDTH, sparse=True)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.first, self.second])
        extra = (x @ self.transposed).sum() + self.expanded.sum()
        rows = self.table(torch.arange(4))
        return self.linear(x) * joined + extra + (self.same_a + self.same_b + rows).mean(0)


class Embed(nn.Module):
    def __init__(self, rows: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding(x)
