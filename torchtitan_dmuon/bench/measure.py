"""What a job makes one process hold and send, measured from outside of what is compared."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import struct
from collections.abc import Iterator

import torch

from torchtitan_dmuon.memory import others_bytes, settle, status_bytes

_BYTES_SENT_OFFSET = 200
"""Of tcpi_bytes_sent (uint64) in Linux's struct tcp_info, since 4.19."""


def sent_bytes() -> int | None:
    """Return the payload bytes that this process's open TCP connections have sent so far.

    The kernel counts them, so gloo's collectives are counted whoever calls them, with the bytes
    that its algorithms really send (loopback included). On GPUs the bytes move past the kernel, and
    elsewhere than on Linux it does not say: None.
    """
    if torch.cuda.is_available() or not hasattr(socket, "TCP_INFO"):
        return None
    total = 0
    for connection in _connections():
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        if len(info) < _BYTES_SENT_OFFSET + 8:
            return None
        total += struct.unpack_from("Q", info, _BYTES_SENT_OFFSET)[0]
    return total


def _connections() -> Iterator[socket.socket]:
    """Yield a duplicate of each TCP connection of this process, and close it."""
    for descriptor in os.listdir("/proc/self/fd"):
        # Another thread may close any of them at any time.
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                families = (socket.AF_INET, socket.AF_INET6)
                if connection.type == socket.SOCK_STREAM and connection.family in families:
                    yield connection


class PeakMemory:
    """The largest growth of what this process holds, since this object was made.

    On a GPU that is what torch has allocated; on a CPU the resident set of the process (VmHWM
    against VmRSS of /proc/self/status), from which freed memory is given back to the system first.
    Memory that processes share, as line D's pool, is counted once in all of them together.
    """

    def __init__(self) -> None:
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._start = torch.cuda.memory_allocated()
            return
        settle()
        self._start = status_bytes("VmRSS") - others_bytes()

    def grown_bytes(self) -> int:
        """Return peak minus start."""
        if torch.cuda.is_available():
            return int(torch.cuda.max_memory_allocated()) - self._start
        # What was shared at the peak is not told; windows are there until their job ends.
        return status_bytes("VmHWM") - others_bytes() - self._start
