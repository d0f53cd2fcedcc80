"""What a process holds in memory."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

import torch

POOL_FILE = "pool.json"
"""In a job's folder: bytes of the symmetric pool on a rank, by part."""


def status_bytes(name: str) -> int:
    """Return a size that Linux tells of this process (/proc/self/status), e.g. VmRSS.

    Raises:
        OSError: it does not tell; so elsewhere than on Linux.
    """
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    if found is None:
        raise OSError(f"/proc/self/status has no {name}: memory is measured on Linux only")
    return int(found.group(1)) * 1024


def others_bytes() -> int:
    """Return the part of this process's resident memory that counts for other processes.

    A page of shared memory is resident in all processes that have touched it: each counts for its
    share, as in the proportional set size of proc(5).

    Raises:
        OSError: the system does not tell; so elsewhere than on Linux.
    """
    text = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"^Pss_Shmem:\s+(\d+) kB", text, re.M)
    if found is None:
        raise OSError("/proc/self/smaps_rollup has no Pss_Shmem: it needs Linux 5.4 or newer")
    return status_bytes("RssShmem") - int(found.group(1)) * 1024


def give_back(device: torch.device) -> None:
    """Give memory that torch's allocator has freed and keeps for itself back to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def settle() -> None:
    """Give freed memory back to the system, and let its high-water mark (VmHWM) start anew."""
    gc.collect()
    give_back(torch.device("cpu"))
    # "5" resets the high-water mark of the resident set (proc(5)).
    Path("/proc/self/clear_refs").write_text("5")
