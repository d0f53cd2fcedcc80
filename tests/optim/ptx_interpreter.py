"""Runs PTX on the CPU: every thread of every block of a grid at once, in numpy.

What it is for: a kernel's own PTX, run to the last instruction on a machine without a GPU. It is
stricter than a GPU where that finds mistakes. ``cp.async`` lands when its thread waits for it and
no earlier; shared memory starts as NaN; a race, a misaligned or foreign address, a divergent
``mma`` or ``ldmatrix``, or a register read before it is written ends the run.

Threads may diverge: of the threads that can run, those at the lowest block of statements run
next, so that they meet again where a branch joins. Instructions that the kernels under test do
not use are an error, not a guess. Arithmetic follows the PTX ISA, except that ``mma`` adds its 16
products in float64 and rounds once; hardware keeps fewer bits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.optim.ptx_memory import GlobalMemory, MemoryFault, SharedMemory
from tests.optim.ptx_program import Address, Operand, Program, Statement

Array = NDArray[Any]

_WARP = 32
_SHARED_TYPES = {"pred": np.bool_, "f32": np.float32, "f64": np.float64}
_COMPARE = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


def _dtype(name: str) -> np.dtype[Any]:
    """numpy's type of a PTX type; untyped bits are unsigned."""
    if name in _SHARED_TYPES:
        return np.dtype(_SHARED_TYPES[name])
    return np.dtype(f"{'i' if name[0] == 's' else 'u'}{int(name[1:]) // 8}")


def float_of_bits(bits: Array, name: str) -> NDArray[np.float32]:
    """float32 values of 16-bit words that hold "f16" or "bf16"."""
    if name == "f16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bits_of_float(values: NDArray[np.float32], name: str) -> NDArray[np.uint16]:
    """16-bit words of float32 values rounded to nearest even as "f16" or "bf16"."""
    if name == "f16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


class Machine:
    """One launch: registers of all threads, shared memory of all blocks, global memory.

    Args:
        program: The entry.
        arguments: Values of its parameters, in order.
        memory: Global memory, shared with the caller.
        blocks: The blocks to run, as their indices along x and y.
        shared_bytes: Dynamic shared memory per block.
    """

    def __init__(
        self,
        program: Program,
        arguments: Sequence[int | float],
        memory: GlobalMemory,
        blocks: Sequence[tuple[int, int]],
        shared_bytes: int,
    ) -> None:
        if len(arguments) != len(program.parameters):
            raise ValueError(f"{len(program.parameters)} parameters, {len(arguments)} arguments")
        self.program = program
        self.memory = memory
        self.num_lanes = len(blocks) * program.block_threads
        lanes = np.arange(self.num_lanes)
        self.block = lanes // program.block_threads
        self.thread = lanes % program.block_threads
        self.shared = SharedMemory(len(blocks), shared_bytes)
        self.registers: dict[str, Array] = {}
        self._parameters = {
            name: np.array(value, _dtype(kind))
            for (name, kind), value in zip(program.parameters.items(), arguments, strict=True)
        }
        self._special = {
            "%tid.x": self.thread,
            "%ctaid.x": np.array([x for x, _ in blocks])[self.block],
            "%ctaid.y": np.array([y for _, y in blocks])[self.block],
            "%ntid.x": np.full(self.num_lanes, program.block_threads),
        }
        # Copies that have not landed: in the open group, and in the groups that were committed.
        self._open: list[_Copy] = []
        self._groups: list[list[_Copy]] = []
        self._committed: list[NDArray[np.bool_]] = []
        self.bank_conflicts = 0
        """Matrices that ldmatrix read although two of their eight rows share memory banks."""
        self._position = np.zeros(self.num_lanes, np.int64)
        self._mask = np.ones(self.num_lanes, bool)

    def run(self, max_blocks: int = 100_000) -> None:
        """Run all threads to their end.

        Raises:
            MemoryFault: See `ptx_memory`.
            AssertionError: Divergence where the ISA forbids it, a barrier that not all reach, or
                more than ``max_blocks`` blocks of statements.
        """
        finished = len(self.program.blocks)
        waiting = np.zeros(self.num_lanes, bool)
        with np.errstate(all="ignore"):
            for _ in range(max_blocks):
                runnable = (self._position < finished) & ~waiting
                if not np.any(runnable):
                    if not np.any(waiting):
                        return
                    raise AssertionError("a barrier that some threads of a block never reach")
                at = int(self._position[runnable].min())
                self._mask = runnable & (self._position == at)
                if self._run_block(at):
                    waiting |= self._mask
                    self._release(waiting, finished)
        raise AssertionError(f"still running after {max_blocks} blocks of statements")

    def _release(self, waiting: NDArray[np.bool_], finished: int) -> None:
        """Let the blocks go on of which every thread waits at one barrier."""
        by_block = waiting.reshape(-1, self.program.block_threads)
        place = self._position.reshape(by_block.shape)
        together = by_block.all(axis=1) & (place == place[:, :1]).all(axis=1)
        by_block[together] = False
        self.shared.epoch[together] += 1

    def _run_block(self, at: int) -> bool:
        """Run one block for the masked threads; whether it ended at a barrier."""
        after = np.full(self.num_lanes, at + 1)
        barrier = False
        for statement in self.program.blocks[at]:
            try:
                kind = statement.opcode[0]
                if kind == "bra":
                    target = self.program.labels[str(statement.operands[-1])]
                    after[self._guarded(statement)] = target
                elif kind in ("ret", "exit"):
                    after[self._guarded(statement)] = len(self.program.blocks)
                elif kind == "bar":
                    assert statement.guard is None and statement.operands == ("0",)
                    barrier = True
                else:
                    self._execute(statement)
            except (AssertionError, KeyError, ValueError) as error:
                kind_of_error = MemoryFault if isinstance(error, MemoryFault) else AssertionError
                raise kind_of_error(f"line {statement.line}: {statement.text}: {error}") from error
        self._position[self._mask] = after[self._mask]
        return barrier

    def _guarded(self, statement: Statement) -> NDArray[np.bool_]:
        if statement.guard is None:
            return self._mask
        predicate = self.read(statement.guard, "pred")
        return self._mask & (~predicate if statement.negated else predicate)

    def _execute(self, statement: Statement) -> None:
        handler = _HANDLERS.get(statement.opcode[0])
        if handler is None:
            raise AssertionError(f"this interpreter has no {statement.opcode[0]}")
        saved = self._mask
        self._mask = self._guarded(statement)
        handler(self, statement.opcode, statement.operands)
        self._mask = saved

    # Operands.

    def read(self, operand: Operand, kind: str) -> Array:
        """Values of a source operand in all lanes, as numpy's type of the PTX type ``kind``."""
        assert isinstance(operand, str), f"{operand} is no scalar operand"
        dtype = _dtype(kind)
        if operand in self._special:
            return self._special[operand].astype(dtype)
        if operand.startswith("%"):
            bits = self.registers.get(operand)
            assert bits is not None, f"{operand} is read before it is written"
            assert bits.dtype.itemsize == dtype.itemsize, f"{operand} has another size than {kind}"
            return bits.view(dtype)
        if operand.startswith("0f"):
            value = np.array(int(operand[2:], 16), np.uint32).view(dtype)
        elif operand in self.program.shared_symbols:
            value = np.array(SharedMemory.BASE, dtype)
        else:
            value = np.array(int(operand, 0) & (2 ** (8 * dtype.itemsize) - 1)).astype(dtype)
        return np.broadcast_to(value, self.num_lanes)

    def write(self, operand: Operand, values: Array) -> None:
        """Assign to a register in the lanes that run."""
        assert isinstance(operand, str) and operand.startswith("%")
        bits = values if values.dtype == np.bool_ else values.view(f"u{values.dtype.itemsize}")
        old = self.registers.get(operand)
        if self._mask.all() or old is None:
            # A lane that does not run gets a value here too; ptxas itself guarantees that no
            # register is read on a path on which it was not written.
            self.registers[operand] = np.array(np.broadcast_to(bits, self.num_lanes))
        else:
            self.registers[operand] = np.where(self._mask, bits, old)

    def addresses(self, operand: Operand) -> Array:
        """Addresses of a memory operand in the lanes that run."""
        assert isinstance(operand, Address)
        if operand.base in self.program.shared_symbols:
            base = np.full(self.num_lanes, SharedMemory.BASE, np.int64)
        else:
            base = self.registers[operand.base]
        return base[self._mask] + np.asarray(operand.offset).astype(base.dtype)

    def lanes(self) -> tuple[Array, Array]:
        """Block and thread of the lanes that run, to tell shared memory who asks."""
        return self.block[self._mask], self.thread[self._mask]

    def whole_warps(self) -> Array:
        """Warps that run; every one must do so with all its threads."""
        mask = self._mask.reshape(-1, _WARP)
        warps = mask.any(axis=1)
        assert mask[warps].all(), "a warp executes this with a part of its threads"
        return np.flatnonzero(warps)

    # Memory.

    def load(self, opcode: Sequence[str], operands: Sequence[Operand]) -> None:
        target, source = operands
        if opcode[1] == "param":
            assert isinstance(source, Address) and source.offset == 0
            self.write(target, np.broadcast_to(self._parameters[source.base], self.num_lanes))
            return
        registers = target if isinstance(target, tuple) else (target,)
        size = _dtype(opcode[-1]).itemsize
        where = self.addresses(source)
        if opcode[1] == "global":
            words = self.memory.load(where, size * len(registers))
        else:
            assert opcode[1] == "shared"
            words = self.shared.load(*self.lanes(), where.astype(np.int64), size * len(registers))
        for index, register in enumerate(registers):
            part = np.ascontiguousarray(words[:, index * size // 2 : (index + 1) * size // 2])
            values = np.zeros(self.num_lanes, f"u{size}")
            values[self._mask] = part.view(f"u{size}")[:, 0]
            self.write(register, values)

    def store(self, opcode: Sequence[str], operands: Sequence[Operand]) -> None:
        target, source = operands
        registers = source if isinstance(source, tuple) else (source,)
        values = np.stack([self._low_bits(r, opcode[-1])[self._mask] for r in registers], axis=1)
        words = np.ascontiguousarray(values).view(np.uint16)
        where = self.addresses(target)
        if opcode[1] == "global":
            self.memory.store(where, words)
        else:
            assert opcode[1] == "shared"
            self.shared.store(*self.lanes(), where.astype(np.int64), words)

    def _low_bits(self, operand: Operand, kind: str) -> Array:
        """A source operand of ``st``, which may be a register wider than the type it stores."""
        bits = self.registers.get(str(operand))
        if bits is None:
            return self.read(operand, kind)
        return bits.astype(_dtype(f"b{8 * _dtype(kind).itemsize}"))

    def copy_async(self, opcode: Sequence[str], operands: Sequence[Operand]) -> None:
        if opcode[2] == "commit_group":
            self._groups.append(self._open)
            self._committed.append(self._mask.copy())
            self._open = []
        elif opcode[2] == "wait_group":
            self._wait(int(str(operands[0])))
        else:
            assert tuple(opcode[2:]) == ("cg", "shared", "global"), "only .cg.shared.global"
            target, source, size, *source_size = operands
            assert size == "16" and source_size in ([], ["16"]), "only whole 16-byte copies"
            if not self._mask.any():
                return
            indices = self.shared.begin_copy(*self.lanes(), self.addresses(target), 16)
            self._open.append(_Copy(self._mask.copy(), self.addresses(source), indices))

    def _wait(self, pending: int) -> None:
        """Land what each running thread committed, except in its newest ``pending`` groups."""
        newer = np.zeros(self.num_lanes, np.int64)
        for copies, members in zip(self._groups[::-1], self._committed[::-1], strict=True):
            due = self._mask & (newer >= pending)
            newer += members
            for copy in copies:
                lands = due[copy.mask] & copy.flying
                if lands.any():
                    who = np.flatnonzero(copy.mask)[lands]
                    words = self.memory.load(copy.source[lands], 16)
                    self.shared.land(self.block[who], self.thread[who], copy.indices[lands], words)
                    copy.flying &= ~lands

    # Tensor cores. Layouts: PTX ISA, "Matrix Fragments for mma.m16n8k16" and "ldmatrix".

    def load_matrices(self, opcode: Sequence[str], operands: Sequence[Operand]) -> None:
        targets, source = operands
        assert isinstance(targets, tuple)
        assert opcode[1:4] == ("sync", "aligned", "m8n8") and opcode[-1] == "b16"
        warps = self.whole_warps()
        # Lane 8 * i + r gives the address of row r of matrix i.
        giving = np.zeros((len(warps), _WARP), bool)
        giving[:, : 8 * len(targets)] = True
        giving = giving.reshape(-1)
        block, thread = self.lanes()
        where = self.addresses(source)[giving].astype(np.int64)
        # 32 banks of 4 bytes: a row of 16 bytes takes one of eight places.
        banks = np.sort(where.reshape(-1, 8) // 16 % 8, axis=1)
        self.bank_conflicts += int(np.any(banks != np.arange(8), axis=1).sum())
        rows = self.shared.load(block[giving], thread[giving], where, 16)
        rows = rows.reshape(len(warps), len(targets), 8, 8)
        if "trans" in opcode:
            rows = rows.transpose(0, 1, 3, 2)
        # Lane l gets elements 2 * (l % 4) and the next of row l // 4.
        pairs = np.ascontiguousarray(rows).view(np.uint32).reshape(len(warps), len(targets), _WARP)
        for index, register in enumerate(targets):
            values = np.zeros(self.num_lanes, np.uint32)
            values[self._mask] = pairs[:, index].reshape(-1)
            self.write(register, values)

    def multiply(self, opcode: Sequence[str], operands: Sequence[Operand]) -> None:
        assert opcode[1:6] == ("sync", "aligned", "m16n8k16", "row", "col")
        kind = opcode[7]
        assert opcode[6:] == ("f32", kind, kind, "f32") and kind in ("f16", "bf16")
        target, a, b, c = operands
        warps = self.whole_warps()
        left = self._fragment(a, kind, warps, ((0, 0), (8, 0), (0, 8), (8, 8)), (16, 16))
        right = self._fragment(b, kind, warps, ((0, 0), (0, 8)), (8, 16))
        product = left.astype(np.float64) @ right.astype(np.float64).transpose(0, 2, 1)
        assert isinstance(target, tuple) and isinstance(c, tuple)
        lane = np.arange(_WARP)
        for index in range(4):
            row, column = lane // 4 + 8 * (index // 2), 2 * (lane % 4) + index % 2
            added = self.read(c[index], "f32").reshape(-1, _WARP)[warps]
            values = np.zeros(self.num_lanes, np.float32)
            values[self._mask] = (added + product[:, row, column]).astype(np.float32).reshape(-1)
            self.write(target[index], values)

    def _fragment(
        self,
        operand: Operand,
        kind: str,
        warps: Array,
        corners: Sequence[tuple[int, int]],
        shape: tuple[int, int],
    ) -> NDArray[np.float32]:
        """(warps, rows, k) from registers of which each holds 8 rows by 8 of k, a pair per lane."""
        assert isinstance(operand, tuple) and len(operand) == len(corners)
        matrix = np.empty((len(warps), *shape), np.float32)
        for register, (row, column) in zip(operand, corners, strict=True):
            bits = self.read(register, "b32").reshape(-1, _WARP)[warps]
            pairs = np.ascontiguousarray(bits).view(np.uint16).reshape(-1, 8, 8)
            matrix[:, row : row + 8, column : column + 8] = float_of_bits(pairs, kind)
        return matrix

    # Everything that stays inside a lane.

    def move(self, opcode: Sequence[str], operands: Sequence[Operand]) -> None:
        target, source = operands
        if isinstance(source, tuple):
            half = f"b{int(opcode[1][1:]) // len(source)}"
            parts = np.stack([self.read(part, half) for part in source], axis=1)
            self.write(target, np.ascontiguousarray(parts).view(_dtype(opcode[1]))[:, 0])
        elif isinstance(target, tuple):
            part = f"u{_dtype(opcode[1]).itemsize // len(target)}"
            parts = np.ascontiguousarray(self.read(source, opcode[1])).view(part)
            for index, register in enumerate(target):
                if register != "_":
                    self.write(register, parts.reshape(-1, len(target))[:, index].copy())
        else:
            self.write(target, self.read(source, opcode[1]))

    def shuffle(self, opcode: Sequence[str], operands: Sequence[Operand]) -> None:
        assert tuple(opcode[1:]) == ("sync", "idx", "b32"), "only shfl.sync.idx.b32"
        target, source, lane, clamp, members = operands
        assert (clamp, members) == ("31", "-1"), "only shuffles among all lanes of a warp"
        self.whole_warps()
        values = self.read(source, "b32").reshape(-1, _WARP)
        chosen = self.read(lane, "b32").reshape(-1, _WARP).astype(np.int64) % _WARP
        self.write(target, np.take_along_axis(values, chosen, axis=1).reshape(-1))

    def convert(self, opcode: Sequence[str], operands: Sequence[Operand]) -> None:
        to, source = opcode[-2:]
        target = operands[0]
        if to == "f16x2":
            high, low = (bits_of_float(self.read(o, "f32"), "f16") for o in operands[1:])
            both = np.ascontiguousarray(np.stack([low, high], axis=1))
            self.write(target, both.view(np.uint32)[:, 0])
        elif to in ("f16", "bf16"):
            assert source == "f32" and "rn" in opcode
            self.write(target, bits_of_float(self.read(operands[1], "f32"), to))
        elif source in ("f16", "bf16"):
            assert to == "f32"
            self.write(target, float_of_bits(self.read(operands[1], "b16"), source))
        elif source == "f32":
            assert "rzi" in opcode
            self.write(target, np.trunc(self.read(operands[1], "f32")).astype(_dtype(to)))
        else:
            self.write(target, self.read(operands[1], source).astype(_dtype(to)))

    def compare(self, opcode: Sequence[str], operands: Sequence[Operand]) -> None:
        assert len(opcode) == 3, "only setp with one comparison"
        a, b = (self.read(o, opcode[2]) for o in operands[1:])
        self.write(operands[0], _COMPARE[opcode[1]](a, b))

    def select(self, opcode: Sequence[str], operands: Sequence[Operand]) -> None:
        a, b = (self.read(o, opcode[1]) for o in operands[1:3])
        self.write(operands[0], np.where(self.read(operands[3], "pred"), a, b))

    def multiply_add(self, opcode: Sequence[str], operands: Sequence[Operand]) -> None:
        kind = opcode[-1]
        if kind == "f32":
            # The product is exact in float64; the sum is rounded there and then to float32.
            assert opcode[0] == "mul" or "rn" in opcode
            values = self.read(operands[1], kind).astype(np.float64) * self.read(operands[2], kind)
            result_kind = kind
        else:
            wide = opcode[1] == "wide"
            assert wide or opcode[1] == "lo"
            result_kind = f"{kind[0]}{2 * int(kind[1:])}" if wide else kind
            a, b = (self.read(o, kind).astype(_dtype(result_kind)) for o in operands[1:3])
            values = a * b
        if opcode[0] in ("mad", "fma"):
            values = values + self.read(operands[3], result_kind)
        self.write(operands[0], values.astype(_dtype(result_kind)))

    def shift(self, opcode: Sequence[str], operands: Sequence[Operand]) -> None:
        value = self.read(operands[1], opcode[1])
        bits = 8 * value.dtype.itemsize
        amount = self.read(operands[2], "u32")
        assert np.all(amount[self._mask] < bits), "a shift by the width of the type or more"
        shifted = operator.lshift if opcode[0] == "shl" else operator.rshift
        self.write(operands[0], shifted(value, amount.astype(value.dtype)))


class _Copy:
    """Asynchronous copies that one instruction started: source and target per issuing lane."""

    def __init__(self, mask: Array, source: Array, indices: Array) -> None:
        self.mask, self.source, self.indices = mask, source, indices
        self.flying = np.ones(len(source), bool)


_Handler = Callable[[Machine, Sequence[str], Sequence[Operand]], None]


def _elementwise(function: Callable[..., Array]) -> _Handler:
    """Handler of an operation whose operands all have the type at the end of the opcode."""

    def handler(machine: Machine, opcode: Sequence[str], operands: Sequence[Operand]) -> None:
        kind = opcode[-1]
        sources = [machine.read(operand, kind) for operand in operands[1:]]
        machine.write(operands[0], function(*sources).astype(_dtype(kind)))

    return handler


_HANDLERS: dict[str, _Handler] = {
    "ld": Machine.load,
    "st": Machine.store,
    "cp": Machine.copy_async,
    "ldmatrix": Machine.load_matrices,
    "mma": Machine.multiply,
    "mov": Machine.move,
    "shfl": Machine.shuffle,
    "cvt": Machine.convert,
    "setp": Machine.compare,
    "selp": Machine.select,
    "mul": Machine.multiply_add,
    "mad": Machine.multiply_add,
    "fma": Machine.multiply_add,
    "shl": Machine.shift,
    "shr": Machine.shift,
    "add": _elementwise(operator.add),
    "sub": _elementwise(operator.sub),
    "min": _elementwise(np.minimum),
    "max": _elementwise(np.maximum),
    "neg": _elementwise(operator.neg),
    "and": _elementwise(operator.and_),
    "or": _elementwise(operator.or_),
    "xor": _elementwise(operator.xor),
    "not": _elementwise(operator.invert),
    "sqrt": _elementwise(np.sqrt),
}
