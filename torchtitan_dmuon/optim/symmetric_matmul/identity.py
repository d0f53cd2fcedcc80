"""What the choice of a backend depends on besides the problem: the device and the libraries."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

import torch

from torchtitan_dmuon.optim.symmetric_matmul import cute, quack


def package_version(name: str) -> str:
    """Return the version of an installed package, or "" if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def cpu_model() -> str:
    """Return the CPU's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # Not Linux.
    return platform.processor() or platform.machine()


def cpu_units() -> list[str]:
    """Return the vector and matrix units that torch's CPU kernels can use, e.g. avx2, amx_tile."""
    tests = {
        "avx512_bf16": "_is_avx512_bf16_supported",
        "vnni": "_is_vnni_supported",
        "amx_tile": "_is_amx_tile_supported",
        "amx_fp16": "_is_amx_fp16_supported",
    }
    # The tests are torch's private functions: one that a torch lacks counts as no.
    found = [unit for unit, test in tests.items() if getattr(torch.cpu, test, lambda: False)()]
    return [torch.backends.cpu.get_cpu_capability().lower(), *found]


def identity(device: torch.device) -> dict[str, str]:
    """Return what a choice on `device` holds for: two runs with the same share one file."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        where = {
            "device": torch.cuda.get_device_name(device),
            "units": f"sm_{major}{minor}",
            "quack-kernels": package_version(quack.PACKAGE),
            "nvidia-cutlass-dsl": package_version(cute.PACKAGE),
        }
    else:
        where = {
            "device": cpu_model(),
            "units": " ".join(cpu_units()),
            "threads": str(torch.get_num_threads()),
        }
    return {**where, "torch": str(torch.__version__)}
