"""The CUDA driver's calls that launch a kernel, on the PTX interpreter.

Stands in for ``cuda.bindings.driver`` in tests of `cute_sm80.launch` with CPU tensors.
"""

from __future__ import annotations

import ctypes
import enum
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.optim.ptx_interpreter import Machine
from tests.optim.ptx_memory import GlobalMemory
from tests.optim.ptx_program import Program, parse

_SHARED_BYTES_WITHOUT_ASKING = 48 * 1024


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NOT_FOUND = 500


class EmulatedDriver:
    """Runs launches at once, with the operands of the sm_80 kernel as the only mapped memory.

    Args:
        ptx: PTX of every cubin that may be loaded.
    """

    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")

    def __init__(self, ptx: dict[bytes, str]) -> None:
        self._ptx = ptx
        self._shared_limit = _SHARED_BYTES_WITHOUT_ASKING
        self.loads = 0
        self.streams: list[int] = []

    def cuModuleLoadData(self, image: bytes) -> tuple[Status, bytes]:
        self.loads += 1
        return Status.CUDA_SUCCESS, image

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[Any, ...]:
        program = parse(self._ptx[module])
        if name not in module or name.decode() != program.name:
            return Status.CUDA_ERROR_NOT_FOUND, None
        return Status.CUDA_SUCCESS, program

    def cuFuncSetAttribute(self, function: Program, attribute: str, value: int) -> tuple[Status]:
        assert attribute == "shared"
        self._shared_limit = value
        return (Status.CUDA_SUCCESS,)

    def cuLaunchKernel(
        self,
        function: Program,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        block_x: int,
        block_y: int,
        block_z: int,
        shared_bytes: int,
        stream: int,
        parameters: tuple[tuple[Any, ...], tuple[Any, ...]],
        extra: int,
    ) -> tuple[Status]:
        values, types = parameters
        sizes = [ctypes.sizeof(kind) for kind in types]
        declared = [int(kind[1:]) // 8 for kind in function.parameters.values()]
        fits = (
            sizes == declared
            and (block_x, block_y, block_z) == (function.block_threads, 1, 1)
            and min(grid_x, grid_y, grid_z) >= 1
            and shared_bytes <= self._shared_limit
        )
        if not fits or extra:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        self.streams.append(stream)
        a, b, c, d, m, k, _, _ = values
        memory = GlobalMemory()
        for address, words in ((a, m * k), (b, m * k), (c, m * m)):
            if address:
                memory.map(address, _words_at(address, grid_y * words))
        memory.map(d, _words_at(d, grid_y * m * m), writable=True)
        blocks = [(x, y) for y in range(grid_y) for x in range(grid_x)]
        Machine(function, values, memory, blocks, shared_bytes).run()
        assert np.all(memory.stores(d) == 1), "an element of D was not stored exactly once"
        return (Status.CUDA_SUCCESS,)


def _words_at(address: int, count: int) -> NDArray[np.uint16]:
    return np.ctypeslib.as_array((ctypes.c_uint16 * count).from_address(address))
