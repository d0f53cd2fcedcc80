"""Compiles and loads csrc/allocator, the part of csrc/ that needs torch's C++ headers.

torch promises no C++ ABI: a library is of one torch alone. So torch's version, its commit and its
string ABI are flags, which makes them part of the cache's key.
"""

from __future__ import annotations

import os
import re
import subprocess
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch

from torchtitan_dmuon.native.build import NativeError, build
from torchtitan_dmuon.native.cuda import find_nvcc

_SOURCES = ("allocator/torch_ops.cpp", "allocator/signatures.cpp")
_CUDA_SOURCE = "allocator/cuda_shim.cpp"
_HEADERS = "allocator"  # half a minute of compiling: not again for headers of other parts


@cache
def load_allocator() -> None:
    """Register the operators `torch.ops.dmuon_allocator`, compiling them at first use.

    Raises:
        NativeError: no compiler, it reported an error, or the library does not load.
    """
    library = build_allocator()
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise NativeError(f"dmuon_allocator: {library} does not load: {error}") from error


def build_allocator(*, folder: Path | None = None) -> Path:
    """Return the library for the torch that is imported, with its CUDA part if torch has one.

    Args:
        folder: The cache; default the user's.

    Raises:
        NativeError: no compiler, or it reported an error.
    """
    root = _torch_folder()
    libraries = [f"-L{root / 'lib'}", "-l:libtorch_cpu.so", "-l:libc10.so"]
    if torch.version.cuda is None:
        return build(
            "dmuon_allocator",
            _SOURCES,
            flags=_flags(),
            libraries=libraries,
            include=[root / "include"],
            headers=_HEADERS,
            folder=folder,
        )
    return build(
        "dmuon_allocator_cuda",
        (*_SOURCES, _CUDA_SOURCE),
        flags=(*_flags(), "-DDMUON_CUDA"),
        libraries=[*libraries, "-l:libc10_cuda.so"],
        include=[root / "include", cuda_include()],
        headers=_HEADERS,
        folder=folder,
    )


def build_cuda_shim(*, folder: Path | None = None) -> Path:
    """Compile the CUDA part alone, to check it where torch was built without CUDA.

    The library is not linked to torch's CUDA libraries and cannot be loaded.

    Raises:
        NativeError: no compiler, no CUDA headers, or it reported an error.
    """
    return build(
        "dmuon_allocator_cuda_check",
        (_CUDA_SOURCE,),
        # The header of settings that this macro leaves out comes with a CUDA build of torch only.
        flags=(*_flags(), "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE"),
        include=[_torch_folder() / "include", cuda_include()],
        headers=_HEADERS,
        folder=folder,
    )


def cuda_include() -> Path:
    """Return the folder of CUDA's runtime headers: the wheels', else nvcc's.

    Raises:
        NativeError: there is neither.
    """
    folders: list[Path] = []
    for wheel in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"):
        with suppress(PackageNotFoundError):
            folders += Path(str(distribution(wheel).locate_file("nvidia"))).glob("*/include")
    with suppress(NativeError):
        # Where a toolkit has them differs; the compiler itself says it.
        command = [str(find_nvcc()), "--dryrun", "-E", "-x", "c++", os.devnull]
        said = subprocess.run(command, check=False, capture_output=True, text=True).stderr
        folders += [Path(path) for path in re.findall(r'#\$ INCLUDES="-I([^"]+)"', said)]
    # The second is in a wheel of its own, which torch does not bring.
    needed = ("cuda_runtime_api.h", "crt/host_config.h")
    for folder in folders:
        if all((folder / header).exists() for header in needed):
            return folder.resolve()
    raise NativeError(
        f"{' and '.join(needed)}: not found in one folder, and the allocator's CUDA part needs "
        "them; pip install nvidia-cuda-runtime nvidia-cuda-crt of torch's CUDA version, or install "
        "CUDA's toolkit"
    )


def _torch_folder() -> Path:
    return Path(torch.__file__).resolve().parent


def _flags() -> tuple[str, ...]:
    abi = int(torch.compiled_with_cxx11_abi())
    return (
        "-std=c++20",  # behind the one of `build`: torch's headers of 2.14 need it
        "-O2",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        f'-DDMUON_TORCH="{torch.__version__} {torch.version.git_version}"',
    )
