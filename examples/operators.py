"""Gather and reduce segments of any length, each with its own owner, over shared memory.

    torchrun --standalone --nproc-per-node 4 examples/operators.py

Four ranks stand for two nodes of two. Rank r owns two stretches of 1000 (r + 1) float32 numbers.
"""

import secrets
from datetime import timedelta

import torch
import torch.distributed as dist

from torchtitan_dmuon.comm.operators import Operators, Segment, place

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, ranks = dist.get_rank(), dist.get_world_size()
nodes = 2 if ranks % 2 == 0 else 1
rails = ranks // nodes

# What moves, the same on every rank: first byte, length and owner of each stretch.
owners = [r for r in range(ranks) for _ in range(2)]
lengths = [4 * 1000 * (owner + 1) for owner in owners]
offsets, nbytes = place(lengths)
segments = [
    Segment(offset, length, node=owner // rails, rail=owner % rails, home=offset)
    for offset, length, owner in zip(offsets, lengths, owners, strict=True)
]

# Memory that all ranks map, under a name that they agree on.
job = [secrets.token_hex(8)]
dist.broadcast_object_list(job)
operators = Operators.shm(
    job[0],
    nodes=nodes,
    rails=rails,
    rank=rank,
    window_bytes=2 * nbytes,
    timeout=timedelta(seconds=60),
)
parameters = operators.empty(nbytes // 4, torch.float32)
gradients = operators.empty(nbytes // 4, torch.float32)
gather = operators.all_gather_v(segments, label="layer 0")
reduce = operators.reduce_scatter_v(segments, torch.float32, label="layer 0")

# Owners write their stretches; after the gather every rank has all of them.
parameters.fill_(-1)
for segment, owner in zip(segments, owners, strict=True):
    if owner == rank:
        parameters[segment.offset // 4 :][: segment.bytes // 4] = owner
gathered = gather(parameters)
# Calls are asynchronous. A reduction may run beside a gather.
gradients.fill_(rank + 1)
reduced = reduce(gradients, gradients)
gathered.wait()
reduced.wait()

total = ranks * (ranks + 1) / 2
for segment, owner in zip(segments, owners, strict=True):
    stretch = slice(segment.offset // 4, (segment.offset + segment.bytes) // 4)
    assert (parameters[stretch] == owner).all()
    if owner == rank:
        assert (gradients[stretch] == total).all()
if rank == 0:
    print(
        f"{len(segments)} segments, {sum(lengths):,} bytes: gathered on all {ranks} ranks, "
        f"and reduced to their owners, on {nodes} nodes of {rails}"
    )
operators.close()
dist.destroy_process_group()
