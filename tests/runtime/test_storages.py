"""Storages that move into a pool and back while tensors use them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn as nn

from tests.runtime.signature_cases import aligned_memory
from torchtitan_dmuon.runtime.signatures import move_back, move_storage


def test_everything_that_shares_the_storage_follows() -> None:
    """Views, a parameter and what autograd saved live in the pool after the move, with the content;
    writing the pool writes them."""
    buffer = torch.arange(24.0)
    weight = nn.Parameter(torch.empty(0))
    weight.data = buffer[8:24].view(4, 4)
    y = torch.ones(1, 4, requires_grad=True) @ weight.t()  # saves a view of the weight
    pool = aligned_memory(256)
    move_storage(buffer, pool[64:192], copy=True)
    assert buffer.data_ptr() == pool.data_ptr() + 64
    assert weight.data_ptr() == pool.data_ptr() + 64 + 32
    assert torch.equal(weight.detach().flatten(), torch.arange(8.0, 24.0))
    pool[64 : 64 + 96].view(torch.float32).mul_(2)
    assert torch.equal(buffer, 2 * torch.arange(24.0))
    (gradient,) = torch.autograd.grad(y.sum(), [y.grad_fn.next_functions[0][0].variable])
    assert torch.equal(gradient, 2 * torch.arange(8.0, 24.0).view(4, 4).sum(0, keepdim=True))


def test_a_freed_buffer_enters_and_leaves() -> None:
    """A storage without bytes gets those that its tensor needs; resized to nothing it gives the
    memory back, and resized again it has ordinary memory."""
    buffer = torch.empty(16)
    view = buffer[4:8]
    buffer.untyped_storage().resize_(0)
    pool = aligned_memory(128)
    pool.zero_()
    move_storage(buffer, pool, copy=False)
    assert buffer.untyped_storage().nbytes() == 64
    assert torch.equal(view, torch.zeros(4))
    buffer.untyped_storage().resize_(0)
    buffer.untyped_storage().resize_(64)
    buffer.fill_(3.0)
    assert torch.equal(view, torch.full((4,), 3.0))
    assert not pool.any()


def test_moving_back() -> None:
    """Back in ordinary memory a storage has its content, and the pool may be written."""
    tensor = torch.arange(5.0)
    pool = aligned_memory(64)
    move_storage(tensor, pool, copy=True)
    move_back(tensor, copy=True)
    pool.zero_()
    assert torch.equal(tensor, torch.arange(5.0))
    move_back(tensor, copy=False)
    assert tensor.untyped_storage().nbytes() == 20


def test_the_pool_lives_as_long_as_who_lives_in_it() -> None:
    """The target's memory is kept by the storage and freed with it."""
    pool = aligned_memory(64)
    storage = weakref.ref(pool.untyped_storage())
    tensor = torch.arange(4.0)
    view = tensor[1:]
    # A tensor of its own, so that the pool's Python objects may go.
    move_storage(tensor, pool.detach(), copy=True)
    address = pool.data_ptr()
    del pool, tensor
    gc.collect()
    noise = [torch.full((32,), 9.0) for _ in range(50)]
    assert view.data_ptr() == address + 4
    assert torch.equal(view, torch.arange(1.0, 4.0))
    del noise, storage


def test_bad_targets_are_refused() -> None:
    """Too small, elsewhere, not contiguous, not aligned, the same storage: named, nothing moved."""
    tensor = torch.arange(8.0)
    address = tensor.data_ptr()
    pool = aligned_memory(128)
    with pytest.raises(ValueError, match="target has 31 bytes, expected at least 32"):
        move_storage(tensor, pool[:31], copy=True)
    with pytest.raises(ValueError, match="target is not contiguous"):
        move_storage(tensor, pool[::2], copy=True)
    with pytest.raises(ValueError, match="target: starts 16 bytes behind a multiple of 64"):
        move_storage(tensor, pool[16:], copy=True)
    with pytest.raises(ValueError, match="target is the tensor's own storage"):
        move_storage(tensor, tensor, copy=True)
    with pytest.raises(ValueError, match="target: expected a strided tensor with memory"):
        move_storage(tensor, torch.empty(64, device="meta"), copy=True)
    with pytest.raises(ValueError, match="tensor: expected a strided tensor"):
        move_back(torch.eye(3).to_sparse(), copy=True)
    assert tensor.data_ptr() == address
    assert torch.equal(tensor, torch.arange(8.0))


@pytest.mark.gpu
def test_cuda_storages_move_in_their_stream() -> None:
    """On a GPU the content follows in the order of the present stream."""
    tensor = torch.zeros(1 << 20, device="cuda")
    pool = torch.empty(1 << 22, dtype=torch.uint8, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10_000_000)
        tensor.fill_(2.0)
        move_storage(tensor, pool, copy=True)
        total = tensor.sum().item()
    assert tensor.data_ptr() == pool.data_ptr()
    assert total == 2 << 20
