"""NorMuon, SOAP and Shampoo as their papers write them, in float64, for one matrix.

Nothing here is shared with the product. Each class is given the gradient and returns the update
(without the learning rate), step by step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


def newton_schulz(g: Tensor) -> Tensor:
    """The five quintic steps of Muon's author."""
    if g.shape[0] > g.shape[1]:
        return newton_schulz(g.T).T
    x = g / g.norm()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


@dataclass
class NorMuonRule:
    """arXiv:2510.05491, Algorithm 1; `authors` is github.com/zichongli5/NorMuon."""

    beta1: float = 0.95
    beta2: float = 0.95
    authors: bool = False
    m: Tensor | None = None
    v: Tensor | None = None

    def step(self, g: Tensor) -> Tensor:
        g = g.double()
        rows, columns = g.shape
        m = torch.zeros_like(g) if self.m is None else self.m
        v = torch.zeros(rows, dtype=torch.float64) if self.v is None else self.v
        self.m = self.beta1 * m + (1 - self.beta1) * g
        ahead = self.beta1 * self.m + (1 - self.beta1) * g
        o = newton_schulz(ahead if self.authors else self.m)
        self.v = self.beta2 * v + (1 - self.beta2) * (o * o).sum(1) / columns
        scaled = torch.diag(1 / (self.v.sqrt() + 1e-10)) @ o
        if self.authors:
            return scaled * o.norm() / scaled.norm() * max(1, rows / columns) ** 0.5
        return 0.2 * (rows * columns) ** 0.5 / scaled.norm() * scaled


@dataclass
class SoapRule:
    """arXiv:2409.11321, Algorithms 3 and 4, momentum outside the basis; first step as the authors'.

    A basis may be given from outside in place of the one that this computes: where statistics lack
    rank, part of it is arbitrary. `iterated` is what the last power iteration decomposed.
    """

    betas: tuple[float, float] = (0.95, 0.95)
    shampoo_beta: float = 0.95
    eps: float = 1e-8
    frequency: int = 10
    two_sided: tuple[bool, bool] = (True, True)
    t: int = -1
    iterated: dict[int, Tensor] = field(default_factory=dict)

    def step(self, g: Tensor) -> Tensor:
        g = g.double()
        self.t += 1
        if self.t == 0:
            self.m = self.v = torch.zeros_like(g)
            self.left = (1 - self.shampoo_beta) * g @ g.T
            self.right = (1 - self.shampoo_beta) * g.T @ g
            self.q_left = self._first(self.left, 0)
            self.q_right = self._first(self.right, 1)
            return torch.zeros_like(g)
        (b1, b2), t = self.betas, self.t
        rotated = self.q_left.T @ g @ self.q_right
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * rotated**2
        m_rotated = self.q_left.T @ self.m @ self.q_right
        n = m_rotated / (self.v.sqrt() + self.eps) * (1 - b2**t) ** 0.5 / (1 - b1**t)
        update = self.q_left @ n @ self.q_right.T
        self.left = self.shampoo_beta * self.left + (1 - self.shampoo_beta) * g @ g.T
        self.right = self.shampoo_beta * self.right + (1 - self.shampoo_beta) * g.T @ g
        if t % self.frequency == 0:
            self.q_left, order = self._power(self.left, self.q_left, 0)
            self.v = self.v[order]
            self.q_right, order = self._power(self.right, self.q_right, 1)
            self.v = self.v[:, order]
        return update

    def _first(self, p: Tensor, side: int) -> Tensor:
        if not self.two_sided[side]:
            return torch.eye(len(p), dtype=torch.float64)
        return torch.linalg.eigh(p)[1].flip(1)

    def _power(self, p: Tensor, q: Tensor, side: int) -> tuple[Tensor, Tensor]:
        if not self.two_sided[side]:
            return q, torch.arange(len(p))
        order = torch.diag(q.T @ p @ q).argsort(descending=True)
        self.iterated[side] = p @ q[:, order]
        return torch.linalg.qr(self.iterated[side])[0], order


@dataclass
class ShampooRule:
    """arXiv:1802.09568, Algorithm 1, with the averages and grafting of arXiv:2309.06497."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-12
    grafting: bool = True
    frequency: int = 1
    two_sided: tuple[bool, bool] = (True, True)
    t: int = 0

    def step(self, g: Tensor) -> Tensor:
        g = g.double()
        self.t += 1
        if self.t == 1:
            self.m = self.a = torch.zeros_like(g)
            self.left, self.right = torch.zeros_like(g @ g.T), torch.zeros_like(g.T @ g)
        b1, b2 = self.betas
        share, bias = (1 - b2, 1 - b2**self.t) if b2 < 1 else (1.0, 1.0)
        self.m = b1 * self.m + (1 - b1) * g
        self.a = b2 * self.a + share * g**2
        self.left = b2 * self.left + share * g @ g.T
        self.right = b2 * self.right + share * g.T @ g
        if self.t % self.frequency == 0 or (self.t < self.frequency and not self.grafting):
            self.l_root = self._root(self.left / bias, 0)
            self.r_root = self._root(self.right / bias, 1)
        m = self.m / (1 - b1**self.t)
        adam = m / ((self.a / bias).sqrt() + 1e-8)
        if self.grafting and self.t < self.frequency:
            return adam
        p = self.l_root @ m @ self.r_root
        return p * adam.norm() / p.norm() if self.grafting else p

    def _root(self, p: Tensor, side: int) -> Tensor:
        eye = torch.eye(len(p), dtype=torch.float64)
        if not self.two_sided[side]:
            return eye
        u, s, _ = torch.linalg.svd(p + self.eps * eye)
        return u @ torch.diag(s ** (-1 / (2 * sum(self.two_sided)))) @ u.T
