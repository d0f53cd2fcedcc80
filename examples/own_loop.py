"""Muon in a training loop of your own: a small transformer that learns to add digit sequences.

    torchrun --standalone --nproc-per-node 4 examples/own_loop.py --replicate 2

Runs on CPUs (gloo) and GPUs (NCCL), on any number of processes; one needs no torchrun. The lines
marked 1, 2 and 3 are all that owned matrices need.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchtitan_dmuon as dmuon

DIGITS, WIDTH, HEADS, VOCAB = 2, 128, 4, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Adder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Embedding(3 * DIGITS + 3, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.size(1)]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def sums(batch: int, generator: torch.Generator) -> torch.Tensor:
    """a + b = c, last digit first: (batch, 3 * DIGITS + 3) tokens; 10 is +, 11 is =."""
    a, b = torch.randint(0, 10, (2, batch, DIGITS), generator=generator)
    total, carry = [], torch.zeros(batch, dtype=torch.long)
    for i in range(DIGITS):
        digit = a[:, i] + b[:, i] + carry
        total.append(digit % 10)
        carry = digit // 10
    plus, equals = torch.full((batch, 1), 10), torch.full((batch, 1), 11)
    return torch.cat([a, plus, b, equals, torch.stack([*total, carry], dim=1)], dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicate", type=int, default=1, help="rows of the mesh (HSDP, DDP)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32, help="sequences per rank and step")
    parser.add_argument("--checkpoints", help="folder to save to every 20 steps, and to go on from")
    args = parser.parse_args()

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    torch.manual_seed(0)  # the same weights on every rank
    model = Adder(args.layers).to(device)

    mesh = None
    if world > 1:
        shape = (args.replicate, world // args.replicate)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    owned = dmuon.dedicate_params(  # 1: before fully_shard
        model,
        mesh,
        matrix_specs={r"qkv\.weight": dmuon.MatrixSpec(rows=(WIDTH, WIDTH, WIDTH))},
    )
    if mesh is not None:  # 2: the rest of the model, owned parameters left alone
        fully_shard(model, mesh=mesh, ignored_params=owned.parameters)
    optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=3e-3)  # 3
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    if rank == 0:
        print(optimizer.routing())
        print(owned.table())

    start = 0
    if args.checkpoints:
        state = {"schedule": schedule}
        start = dmuon.load_checkpoint(args.checkpoints, model, optimizer, state) or 0
    for step in range(start + 1, args.steps + 1):
        # Different data on every rank and in every step.
        generator = torch.Generator().manual_seed(step * world + rank)
        tokens = sums(args.batch, generator).to(device)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(
            logits[:, -DIGITS - 1 :].flatten(0, 1), tokens[:, -DIGITS - 1 :].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        norm = dmuon.clip_grad_norm_(model, 1.0)
        optimizer.step()
        schedule.step()
        if args.checkpoints and (step % 20 == 0 or step == args.steps):
            dmuon.save_checkpoint(args.checkpoints, step, model, optimizer, state, keep=2)
        if rank == 0 and (step == 1 or step % 10 == 0):
            print(
                f"step {step:3d}  loss {loss.item():.4f}  gradient norm {norm.item():.3f}",
                flush=True,
            )
    if world > 1:
        dmuon.wait_for_publish(model)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
