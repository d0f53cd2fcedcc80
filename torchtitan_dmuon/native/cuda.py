"""Compiles the device code of csrc/; finds nvcc, and NCCL's headers and library."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from torchtitan_dmuon.native.build import NativeError, build

_GIN_SOURCES = (
    "api/gin_api.cpp",
    "api/gin_communicator.cpp",
    "api/gin_publish.cpp",
    "core/publish_table.cpp",
    "core/table.cpp",
    "kernels/operators.cu",
    "kernels/publish.cu",
)
# The first with signals and counters that order their own put alone.
_OLDEST = (2, 30, 7)
_NEEDED = "the gin operators need NCCL 2.30.7 or newer, which torch 2.14.1 brings"
_LOOPBACK_SOURCES = ("api/loopback_api.cu", "core/table.cpp")


class NcclUnfit(NativeError):
    """NCCL is missing, or of a version that the gin operators cannot use."""


@dataclass(frozen=True, slots=True)
class NcclPackage:
    """An installed NCCL wheel.

    Attributes:
        name: Of the package.
        version: As its header says it: major, minor, patch.
        include: Folder of nccl.h and nccl_device.h.
        library: Path of libnccl.so.2.
    """

    name: str
    version: tuple[int, int, int]
    include: Path
    library: Path


def find_nvcc() -> Path:
    """Return nvcc: the one on PATH, else the PyPI wheel's.

    Raises:
        NativeError: there is none.
    """
    on_path = shutil.which("nvcc")
    if on_path is not None:
        return Path(on_path)
    try:
        # The wheels of one CUDA version share a tree, in which nvcc finds its own parts.
        root = Path(str(distribution("nvidia-cuda-nvcc").locate_file("nvidia")))
    except PackageNotFoundError:
        root = None
    found = sorted(root.glob("cu*/bin/nvcc")) if root is not None else []
    if not found:
        raise NativeError(
            "nvcc: not on PATH and not installed as a wheel; install CUDA's compiler, or "
            "pip install nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime "
            "nvidia-cuda-cccl, all of torch's CUDA version"
        )
    return found[-1]


def find_nccl(cuda_major: int) -> NcclPackage:
    """Return the NCCL wheel for a CUDA major version, which is the one that torch loads.

    Raises:
        NcclUnfit: it is not installed, is incomplete, or is too old.
    """
    name = f"nvidia-nccl-cu{cuda_major}"
    try:
        root = Path(str(distribution(name).locate_file("nvidia/nccl")))
    except PackageNotFoundError:
        raise NcclUnfit(
            f"{name}: not installed; the gin operators need its headers and library, of the "
            "version that torch was built for"
        ) from None
    header, library = root / "include" / "nccl.h", root / "lib" / "libnccl.so.2"
    for path in (header, header.with_name("nccl_device.h"), library):
        if not path.exists():
            raise NcclUnfit(f"{name}: {path} is missing; {_NEEDED}")
    version = header_version(header.read_text())
    if version < _OLDEST:
        raise NcclUnfit(f"{name}: is NCCL {_text(version)}; {_NEEDED}")
    return NcclPackage(name, version, header.parent, library)


def header_version(text: str) -> tuple[int, int, int]:
    """Return the version that nccl.h defines.

    Raises:
        NativeError: it defines none.
    """
    parts = []
    for word in ("MAJOR", "MINOR", "PATCH"):
        match = re.search(rf"^#define NCCL_{word} (\d+)", text, re.MULTILINE)
        if match is None:
            raise NativeError(f"nccl.h: defines no NCCL_{word}")
        parts.append(int(match[1]))
    return parts[0], parts[1], parts[2]


def check_nccl(package: NcclPackage, loaded: tuple[int, ...]) -> None:
    """Raise NcclUnfit unless the headers are those of the NCCL that torch has loaded.

    What kernels read of a communicator has the layout of the headers, which changes with versions.
    """
    if tuple(loaded[:3]) != package.version:
        raise NcclUnfit(
            f"{package.name}: its headers are of NCCL {_text(package.version)}, torch has loaded "
            f"NCCL {_text(loaded)}; install {package.name}=={_text(loaded)}"
        )


def build_gin(architecture: str, package: NcclPackage, *, folder: Path | None = None) -> Path:
    """Return the library of the cluster's fabric, compiling it if the cache has none.

    Args:
        architecture: Of the GPU, as `sm_90`.
        package: NCCL; the library is linked by name to the copy that torch has loaded.
        folder: The cache; default the user's.

    Raises:
        NativeError: no compiler, or it reported an error.
    """
    return build(
        f"dmuon_gin_{architecture}",
        _GIN_SOURCES,
        compiler=str(find_nvcc()),
        # Part of the cache's key: a wheel is updated in place.
        flags=(*_flags(architecture), f"-DDMUON_NCCL_HEADERS={_text(package.version)}"),
        include=[package.include],
        libraries=[f"-L{package.library.parent}", "-l:libnccl.so.2", *_runtime_folder()],
        folder=folder,
    )


def build_loopback(architecture: str | None, *, folder: Path | None = None) -> Path:
    """Return the loopback library for a GPU, or, without an architecture, for threads of a host.

    Raises:
        NativeError: no compiler, or it reported an error.
    """
    if architecture is None:
        return build(
            "dmuon_loopback_host",
            _LOOPBACK_SOURCES,
            flags=("-O2", "-x", "c++"),
            libraries=["-pthread"],
            folder=folder,
        )
    return build(
        f"dmuon_loopback_{architecture}",
        _LOOPBACK_SOURCES,
        compiler=str(find_nvcc()),
        flags=(*_flags(architecture), "-lineinfo"),
        libraries=_runtime_folder(),
        folder=folder,
    )


def _flags(architecture: str) -> tuple[str, ...]:
    return ("-O3", f"-arch={architecture}")


def _runtime_folder() -> list[str]:
    # A wheel's nvcc looks for the CUDA runtime in lib64, which wheels do not have.
    folder = find_nvcc().resolve().parent.parent / "lib"
    return [f"-L{folder}"] if (folder / "libcudart_static.a").exists() else []


def _text(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)
