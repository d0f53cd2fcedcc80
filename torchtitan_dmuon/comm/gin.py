"""Opens windows between GPUs of a cluster, over NCCL's device API (csrc/fabric/gin.cuh)."""

from __future__ import annotations

import ctypes
from dataclasses import asdict
from functools import cache

import torch
import torch.distributed as dist

from torchtitan_dmuon.comm.binding import Library, WindowMesh
from torchtitan_dmuon.comm.ranks import gather_objects
from torchtitan_dmuon.comm.window import Window, WindowRefused
from torchtitan_dmuon.native import NativeError
from torchtitan_dmuon.native.cuda import build_gin, check_nccl, find_nccl

_ID_BYTES = 128


@cache
def _library(architecture: str) -> Library:
    package = find_nccl(int(str(torch.version.cuda).split(".")[0]))
    check_nccl(package, torch.cuda.nccl.version())
    path = build_gin(architecture, package)
    return Library(path, "dmuon_gin_open", [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int32])


def prepare(device: torch.device) -> None:
    """Compile and load the library for a GPU.

    Raises:
        NativeError: no nvcc, or no NCCL headers of the version that torch has loaded.
    """
    _library(architecture(device))


def open_window(device: torch.device, group: dist.ProcessGroup, mesh: WindowMesh) -> Window:
    """Open a window between the GPUs of a process group. Collective.

    Args:
        device: This rank's GPU.
        group: Its ranks are the mesh's, in their order: nodes one after the other, as `torchrun`
            numbers them.
        mesh: The same on all ranks, but for `rank`.

    Returns:
        The window. Its calls take a CUDA stream and return at once; when a wait passes its limit
        the kernel ends, and `Window.stuck` and every later call say where it stood.

    Raises:
        NativeError: no nvcc, or no NCCL headers of the version that torch has loaded.
        ValueError: a bad mesh, or ranks that disagree about it.
        WindowRefused: NCCL or CUDA refused on some rank, which the text names with what is missing;
            or NCCL gives ranks different networks.
    """
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    library: Library | None = None
    lack = ""
    # A rank that cannot even begin tells the others, which would wait for it in vain.
    try:
        library = _library(architecture(device))
    except (NativeError, OSError) as error:
        lack = str(error)
    _check_alike(group, mesh, lack)
    assert library is not None
    identity = (ctypes.c_char * _ID_BYTES)()
    # One failing rank must not leave the others waiting for its bytes: None tells them.
    told: list[bytes | str | None] = [None]
    if dist.get_rank(group) == 0:
        try:
            library.call("dmuon_gin_unique_id", identity, ctypes.c_uint64(_ID_BYTES))
            told[0] = identity.raw
        except OSError as error:
            told[0] = str(error)
    dist.broadcast_object_list(told, group=group, group_src=0)
    if not isinstance(told[0], bytes):
        raise WindowRefused(f"gin: rank 0: {told[0]}")
    window: Window | None = None
    own = ""
    try:
        window = Window(library, library.open(mesh, told[0], _ID_BYTES, device.index), mesh)
    except OSError as error:
        own = str(error)
    _check_networks(group, own if window is None else _network_of(window))
    assert window is not None
    return window


def memory(window: Window, device: torch.device) -> torch.Tensor:
    """Return the window's memory, (nbytes,) uint8, without a copy. It keeps the window."""
    return torch.as_tensor(_Memory(window), device=device)


def architecture(device: torch.device) -> str:
    """Return what to compile for, as `sm_90`.

    Raises:
        NativeError: torch has no CUDA, or the GPU is too old.
    """
    if torch.version.cuda is None:
        raise NativeError(
            "gin: this torch has no CUDA; the operators between GPUs need one that has"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise NativeError(f"gin: compute capability {major}.{minor}, expected 8.0 or higher")
    return f"sm_{major}{minor}"


class _Memory:
    """Shows the window to torch, which holds on to it."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.__cuda_array_interface__ = {
            "shape": (window.nbytes,),
            "typestr": "|u1",
            "data": (window.pointer, False),
            "version": 3,
        }


class _Network(ctypes.Structure):
    """`dmuon_gin_network` of csrc/api/dmuon.h."""

    _fields_ = [("contexts", ctypes.c_int32), ("connections", ctypes.c_int32)]


def _network_of(window: Window) -> tuple[int, int]:
    network = _Network()
    window.ask("dmuon_gin_network_of", ctypes.byref(network))
    return network.contexts, network.connections


def _check_networks(group: dist.ProcessGroup, own: tuple[int, int] | str) -> None:
    """Raise WindowRefused on every rank unless all could open and NCCL gives all the same network.

    Sender and receiver of a put pick a context, which has its own signals, from their own numbers:
    with others each would wait for a signal that is counted elsewhere.

    Args:
        group: Of the window's ranks.
        own: Contexts and connections of this rank, or why it has none.
    """
    networks = gather_objects(group, own, "opening of the pool")
    for rank, network in enumerate(networks):
        if isinstance(network, str):
            raise WindowRefused(f"gin: rank {rank}: {network}")
    for rank, network in enumerate(networks):
        if network != networks[0]:
            raise WindowRefused(
                "gin: NCCL gives ranks different networks: rank 0 has {} contexts on {} "
                "connections, rank {} has {} on {}; use one NCCL, one network plug-in and the same "
                "NCCL_GIN settings on all nodes".format(*networks[0], rank, *network)
            )


def _check_alike(group: dist.ProcessGroup, mesh: WindowMesh, lack: str = "") -> None:
    shared: dict[str, object] = {k: v for k, v in asdict(mesh).items() if k != "rank"}
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if mesh.rank != rank or mesh.nodes * mesh.rails != size:
        shared["error"] = (
            f"mesh of {mesh.nodes} x {mesh.rails} ranks and rank {mesh.rank}, expected the "
            f"process group's {size} ranks and rank {rank}"
        )
    lacks = gather_objects(group, lack, "opening of the pool")
    for other, text in enumerate(lacks):
        if text:
            raise NativeError(f"gin: rank {other}: {text}")
    all_shared = gather_objects(group, shared, "opening of the pool")
    for other, values in enumerate(all_shared):
        if "error" in values:
            raise ValueError(f"gin: rank {other}: {values['error']}")
        if values != all_shared[0]:
            raise ValueError(
                f"gin: ranks disagree about the window: rank 0 has {all_shared[0]}, rank {other} "
                f"has {values}"
            )
