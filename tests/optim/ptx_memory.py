"""Global and shared memory of the PTX interpreter: what is wrong on a GPU is an error here.

Both are arrays of 16-bit words, the smallest unit the kernels under test access.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint16]
Lanes = NDArray[np.int64]


class MemoryFault(AssertionError):
    """An access outside a buffer, a misaligned one, or one that races with another thread's."""


@dataclass
class _Buffer:
    address: int
    words: Words
    writable: bool
    stores: Lanes


class GlobalMemory:
    """Buffers at addresses of their own; what lies between them is unmapped.

    Inputs can only be loaded, outputs only stored to.
    """

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []
        self._next = 0x7F00_0000_0000

    def allocate(self, words: Words, *, writable: bool = False) -> int:
        """Map an array, which must be contiguous, far from all others; return its address."""
        address = self._next
        self._next += (words.nbytes // 4096 + 2) * 4096
        self.map(address, words, writable=writable)
        return address

    def map(self, address: int, words: Words, *, writable: bool = False) -> None:
        """Map an array, which must be contiguous, at an address; stores change the array."""
        flat = words.reshape(-1)
        assert np.shares_memory(flat, words) or not words.size
        self._buffers.append(_Buffer(address, flat, writable, np.zeros(flat.size, np.int64)))

    def stores(self, address: int) -> Lanes:
        """How often each word of the buffer at this address was stored to."""
        (found,) = (buffer.stores for buffer in self._buffers if buffer.address == address)
        return found

    def load(self, addresses: NDArray[np.uint64], num_bytes: int) -> Words:
        """(lanes, num_bytes / 2) words."""
        words = np.empty((len(addresses), num_bytes // 2), np.uint16)
        for lanes, buffer, indices in self._find(addresses, num_bytes, writable=False):
            words[lanes] = buffer.words[indices]
        return words

    def store(self, addresses: NDArray[np.uint64], words: Words) -> None:
        for lanes, buffer, indices in self._find(addresses, 2 * words.shape[1], writable=True):
            buffer.words[indices] = words[lanes]
            np.add.at(buffer.stores, indices, 1)

    def _find(
        self, addresses: NDArray[np.uint64], num_bytes: int, *, writable: bool
    ) -> Iterator[tuple[Lanes, _Buffer, Lanes]]:
        what = f"global {'store' if writable else 'load'} of {num_bytes} bytes"
        where = addresses.astype(np.int64)
        if np.any(where % num_bytes):
            raise MemoryFault(f"{what} at a misaligned address")
        missing = np.ones(len(where), bool)
        for buffer in self._buffers:
            offsets = where - buffer.address
            inside = (offsets >= 0) & (offsets + num_bytes <= 2 * buffer.words.size)
            lanes = np.flatnonzero(inside & missing & (buffer.writable == writable))
            missing[lanes] = False
            if lanes.size:
                yield lanes, buffer, offsets[lanes, None] // 2 + np.arange(num_bytes // 2)
        if np.any(missing):
            raise MemoryFault(f"{what} outside the buffers for it, at {where[missing][0]:#x}")


class SharedMemory:
    """Shared memory of many blocks at once, filled with NaN, with a check for data races.

    Between two barriers of a block, no thread may touch a word that another thread writes. A
    word that ``cp.async`` is on its way to belongs to nobody until the issuing thread waited for
    it. `epoch` counts the barriers of each block.
    """

    BASE = 1024

    def __init__(self, num_blocks: int, num_bytes: int) -> None:
        self._num_words = num_bytes // 2
        total = num_blocks * self._num_words
        self._words = np.full(total, 0xFFFF, np.uint16)  # NaN in float16, bfloat16 and float32
        self.epoch = np.zeros(num_blocks, np.int64)
        self._write_epoch = np.full(total, -1, np.int64)
        self._writer = np.full(total, -1, np.int64)
        self._read_epoch = np.full(total, -1, np.int64)
        self._reader = np.full(total, -1, np.int64)
        self._in_flight = np.zeros(total, bool)

    def load(self, blocks: Lanes, threads: Lanes, addresses: Lanes, num_bytes: int) -> Words:
        """(lanes, num_bytes / 2) words."""
        indices = self._indices(blocks, addresses, num_bytes)
        epoch, thread = self.epoch[blocks][:, None], threads[:, None]
        self._check_landed(indices)
        raced = (self._write_epoch[indices] == epoch) & (self._writer[indices] != thread)
        if np.any(raced):
            raise MemoryFault("shared load of what another thread wrote since the last barrier")
        others = (self._read_epoch[indices] == epoch) & (self._reader[indices] != thread)
        # -2: several threads have read it in this epoch. Where lanes of this instruction share a
        # word, one of them is kept by the first assignment and the others find it out.
        self._reader[indices] = np.where(others, -2, thread)
        self._reader[indices[self._reader[indices] != thread]] = -2
        self._read_epoch[indices] = epoch
        return self._words[indices]

    def store(self, blocks: Lanes, threads: Lanes, addresses: Lanes, words: Words) -> None:
        indices = self._claim(blocks, threads, addresses, 2 * words.shape[1])
        self._words[indices] = words
        self._mark_written(blocks, threads, indices)

    def begin_copy(self, blocks: Lanes, threads: Lanes, addresses: Lanes, num_bytes: int) -> Lanes:
        """Note that copies to these addresses are under way; the indices are for `land`.

        cp.async is not ordered after what its own thread did, either: nobody may have used the
        words since the last barrier.
        """
        nobody = np.full_like(threads, -1)
        indices = self._claim(blocks, nobody, addresses, num_bytes)
        self._in_flight[indices] = True
        return indices

    def land(self, blocks: Lanes, threads: Lanes, indices: Lanes, words: Words) -> None:
        """Deliver copies that the threads have waited for."""
        self._words[indices] = words
        self._in_flight[indices] = False
        self._mark_written(blocks, threads, indices)

    def _claim(self, blocks: Lanes, threads: Lanes, addresses: Lanes, num_bytes: int) -> Lanes:
        """Indices of words that the threads may write to."""
        indices = self._indices(blocks, addresses, num_bytes)
        epoch, thread = self.epoch[blocks][:, None], threads[:, None]
        self._check_landed(indices)
        written = (self._write_epoch[indices] == epoch) & (self._writer[indices] != thread)
        read = (self._read_epoch[indices] == epoch) & (self._reader[indices] != thread)
        if np.any(written | read):
            raise MemoryFault("shared store to what another thread used since the last barrier")
        flat = np.sort(indices, axis=None)
        if np.any(flat[1:] == flat[:-1]):
            raise MemoryFault("two threads store to one shared word in one instruction")
        return indices

    def _mark_written(self, blocks: Lanes, threads: Lanes, indices: Lanes) -> None:
        self._write_epoch[indices] = self.epoch[blocks][:, None]
        self._writer[indices] = threads[:, None]

    def _check_landed(self, indices: Lanes) -> None:
        if np.any(self._in_flight[indices]):
            raise MemoryFault("shared access to what cp.async has not delivered: no wait before it")

    def _indices(self, blocks: Lanes, addresses: Lanes, num_bytes: int) -> Lanes:
        offsets = addresses - self.BASE
        if np.any(offsets % num_bytes):
            raise MemoryFault(f"shared access of {num_bytes} bytes at a misaligned address")
        words = offsets[:, None] // 2 + np.arange(num_bytes // 2)
        if np.any(words < 0) or np.any(words >= self._num_words):
            raise MemoryFault("shared access outside the memory of the block")
        return words + blocks[:, None] * self._num_words
