"""A matrix optimizer of your own, and a model trained with it.

    python examples/own_optimizer.py

The class is all there is to write; docs/optimizers.md explains it.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn

from torchtitan_dmuon import MatrixOptimizer, OwnerOptimizer, register


@register("row_adam")
@dataclass(frozen=True, kw_only=True)
class RowAdam(MatrixOptimizer):
    """Adam with one second moment for each row of a matrix.

    Attributes:
        beta1: Share of the old first moment.
        beta2: Share of the old second moment.
    """

    beta1: float = 0.9
    beta2: float = 0.95

    def __post_init__(self):
        super().__post_init__()
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"betas: expected 0 <= beta < 1, got {self.beta1}, {self.beta2}")

    def state_shapes(self, rows, columns):
        return {"step": (), "exp_avg": "elementwise", "exp_avg_sq": (rows, 1)}

    def update(self, gradient, state):
        step = state["step"].add_(1)
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.lerp_(gradient, 1 - self.beta1)
        second.lerp_(gradient.square().mean(dim=1, keepdim=True), 1 - self.beta2)
        root = (second / (1 - self.beta2**step)).sqrt()
        return first / (1 - self.beta1**step) / (root + 1e-8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def train(steps: int = 30) -> list[float]:
    """Learn to turn vectors around; return the losses."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(256, 32)
    optimizer = OwnerOptimizer(model, algorithm=RowAdam, lr=0.01, beta2=0.99)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = train()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
