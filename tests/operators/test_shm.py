"""The operators over shared memory move the right bytes and add the right numbers.

Each mesh is one world of processes; it runs all tables once and brings back what went wrong.
"""

from __future__ import annotations

import random
import time
from functools import cache
from typing import Any

import pytest
import torch

from tests.operators import accuracy
from tests.operators import shm_cases as cases
from tests.operators.accuracy import DTYPES
from tests.operators.shm_cases import MESHES, TABLES, my_rank
from tests.worlds import run_world
from torchtitan_dmuon.comm.operators import Operators, Segment

pytestmark = pytest.mark.usefixtures("rank_server")

UNTOUCHED = 0xEE


def _gather_errors(operators: Operators, mesh: tuple[int, int]) -> dict[str, list[str]]:
    """Gather every table twice, at two places of the window; return what is wrong."""
    places = [operators.empty(cases.LARGEST, torch.uint8) for _ in range(2)]
    errors: dict[str, list[str]] = {}
    for name, segments in cases.gather_tables(mesh):
        group = operators.all_gather_v(segments, label=name)
        errors[name] = []
        for repeat, buffer in enumerate(places):
            size = cases.size_of(segments)
            buffer[: size + 64] = UNTOUCHED
            for i, s in enumerate(segments):
                if cases.owner_of(s, mesh) == my_rank():
                    buffer[s.offset : s.offset + s.bytes] = cases.payload(s.bytes, i + repeat)
            group(buffer).wait()
            end = 0
            for i, s in enumerate(segments):
                got = buffer[s.offset : s.offset + s.bytes]
                if not torch.equal(got, cases.payload(s.bytes, i + repeat)):
                    errors[name].append(f"segment {i}, call {repeat}")
                if (buffer[end : s.offset] != UNTOUCHED).any():
                    errors[name].append(f"bytes before segment {i}, call {repeat}")
                end = s.offset + -(-s.bytes // 16) * 16
            if (buffer[size : size + 64] != UNTOUCHED).any():
                errors[name].append(f"bytes behind the last segment, call {repeat}")
    return errors


def _reduce_errors(
    operators: Operators, mesh: tuple[int, int], dtype: torch.dtype
) -> dict[str, list[str]]:
    """Reduce small integers, into another buffer and in place; return what is wrong."""
    buffer, apart = (operators.empty(cases.LARGEST // dtype.itemsize, dtype) for _ in range(2))
    errors: dict[str, list[str]] = {}
    for name, make in TABLES.items():
        segments = make(mesh)
        group = operators.reduce_scatter_v(segments, dtype, label=name)
        numel = cases.size_of(segments) // dtype.itemsize
        expected = cases.integer_sums(mesh[0] * mesh[1])
        errors[name] = []
        for reduced in (apart, buffer):
            apart.view(torch.uint8)[: cases.size_of(segments)] = UNTOUCHED
            buffer[:numel] = cases.integers(my_rank(), numel, dtype)
            group(buffer, reduced).wait()
            for i, s in enumerate(segments):
                at = slice(s.home // dtype.itemsize, (s.home + s.bytes) // dtype.itemsize)
                got = reduced[at].float()
                if cases.owner_of(s, mesh) == my_rank():
                    if not torch.equal(got, expected[at]):
                        errors[name].append(f"segment {i}, in place: {reduced is buffer}")
                elif (
                    reduced is apart
                    and (apart.view(torch.uint8)[s.home : s.home + s.bytes] != UNTOUCHED).any()
                ):
                    errors[name].append(f"segment {i} of another owner was written")
    return errors


def _special(operators: Operators, dtype: torch.dtype, ranks: int) -> list[float]:
    """Reduce infinities, a NaN with only low bits, and the largest number."""
    buffer = operators.empty(16, dtype)
    buffer.zero_()
    low_nan = torch.tensor([0x7F800001 if dtype.itemsize == 4 else 0x7F81])
    integer = torch.int32 if dtype.itemsize == 4 else torch.int16
    if my_rank() == 0:
        buffer[0], buffer[1] = float("inf"), float("-inf")
        buffer.view(integer)[2] = low_nan.to(integer)
        buffer[3] = torch.finfo(dtype).max
    else:
        buffer[3] = torch.finfo(dtype).max
    segments = [Segment(0, 16 * dtype.itemsize, 0, 0)]
    operators.reduce_scatter_v(segments, dtype, label="special")(buffer, buffer).wait()
    return buffer[:5].float().tolist()


def _world(job: str, mesh: tuple[int, int]) -> dict[str, Any]:
    operators = cases.open_operators(job, mesh)
    result: dict[str, Any] = {"gather": _gather_errors(operators, mesh)}
    for name, dtype in DTYPES.items():
        fresh = cases.open_operators(f"{job}-{name}", mesh)
        result[name] = _reduce_errors(fresh, mesh, dtype)
        result[f"accuracy {name}"] = accuracy.measure(fresh, mesh, dtype)
        result[f"special {name}"] = _special(fresh, dtype, mesh[0] * mesh[1])
        fresh.close()
    operators.close()
    return result


@cache
def results(mesh: tuple[int, int]) -> list[dict[str, Any]]:
    return run_world(mesh[0] * mesh[1], _world, cases.job_name(), mesh, timeout_seconds=120)


def _name(mesh: tuple[int, int]) -> str:
    return f"{mesh[0]}x{mesh[1]}"


@pytest.mark.parametrize("name", [*TABLES, cases.ODD])
@pytest.mark.parametrize("mesh", MESHES, ids=_name)
def test_gathered_bytes_are_the_owners(mesh: tuple[int, int], name: str) -> None:
    """Every rank has every owner's bytes, and no byte beside the segments is written."""
    assert [r["gather"][name] for r in results(mesh)] == [[]] * (mesh[0] * mesh[1])


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mesh", MESHES, ids=_name)
def test_integers_are_reduced_exactly(mesh: tuple[int, int], dtype: str, name: str) -> None:
    """Each rank's part enters the sum once, and only the owner's memory is written."""
    assert [r[dtype][name] for r in results(mesh)] == [[]] * (mesh[0] * mesh[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mesh", MESHES, ids=_name)
def test_one_rounding_per_node(mesh: tuple[int, int], dtype: str) -> None:
    """The error of every element is within one rounding per level (invariant I4)."""
    assert max(r[f"accuracy {dtype}"].of_bound for r in results(mesh)) <= 1


@pytest.mark.parametrize("mesh", [m for m in MESHES if m[1] > 1], ids=_name)
def test_sums_are_more_accurate_than_a_rings(mesh: tuple[int, int]) -> None:
    """A ring rounds once per rank, the operators once per node; scripts/operator_accuracy.py prints
    both."""
    for rank, result in enumerate(results(mesh)):
        found = result["accuracy bfloat16"]
        assert found.operator < found.ring, f"rank {rank}: {found}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_numbers_survive(dtype: str) -> None:
    """Infinities and NaN stay what they are; a sum beyond the largest number is infinite."""
    inf, minus, nan, large, zero = results((2, 2))[0][f"special {dtype}"]
    assert (inf, minus, large, zero) == (float("inf"), float("-inf"), float("inf"), 0)
    assert nan != nan


# -- order in time --------------------------------------------------------------------------------


def _back_to_back(job: str, mesh: tuple[int, int], calls: int, seed: int) -> list[str]:
    """Both operations in flight, several calls each, ranks at different paces."""
    operators = cases.open_operators(job, mesh, chunk_bytes=256, slots=2, window_bytes=cases.MIB)
    tables = [
        cases.table([8, 0, 4096, 700], cases._all_ranks(4, mesh), mesh[1]),
        cases.table([20, 12], [0, mesh[0] * mesh[1] - 1], mesh[1]),
        cases.table([300] * 30, cases._all_ranks(30, mesh), mesh[1]),
    ]
    gathers = [operators.all_gather_v(t, label=f"gather {i}") for i, t in enumerate(tables)]
    reduces = [
        operators.reduce_scatter_v(t, torch.float32, label=f"reduce {i}")
        for i, t in enumerate(tables)
    ]
    depth = 3
    buffers = [operators.empty(cases.size_of(t), torch.uint8) for t in tables * depth]
    inputs = [operators.empty(cases.size_of(t) // 4, torch.float32) for t in tables * depth]
    sleeper = random.Random(seed * 100 + my_rank())
    ranks, errors, flying = mesh[0] * mesh[1], [], []

    def check(call: int, events: Any) -> None:
        for event in events:
            event.wait()
        place, t = call % len(buffers), tables[call % len(tables)]
        for i, s in enumerate(t):
            got = buffers[place][s.offset : s.offset + s.bytes]
            if (got != (call + i) % 251).any():
                errors.append(f"gather call {call} segment {i}")
            if cases.owner_of(s, mesh) == my_rank():
                total = inputs[place][s.home // 4 : (s.home + s.bytes) // 4]
                if (total != ranks * call + ranks * (ranks - 1) // 2).any():
                    errors.append(f"reduce call {call} segment {i}")

    for call in range(calls):
        place, t = call % len(buffers), tables[call % len(tables)]
        for i, s in enumerate(t):
            if cases.owner_of(s, mesh) == my_rank():
                buffers[place][s.offset : s.offset + s.bytes] = (call + i) % 251
        inputs[place].fill_(call + my_rank())
        if sleeper.random() < 0.05:
            time.sleep(sleeper.random() * 0.004)
        which = call % len(tables)
        events = gathers[which](buffers[place]), reduces[which](inputs[place], inputs[place])
        flying.append((call, events))
        if len(flying) == len(buffers):
            check(*flying.pop(0))
    for entry in flying:
        check(*entry)
    operators.close()
    return errors


@pytest.mark.parametrize("mesh", [(1, 4), (2, 2), (4, 1)], ids=_name)
def test_calls_back_to_back(mesh: tuple[int, int]) -> None:
    """Rings wrap, several tables are in flight, both operations at once, ranks at random skew."""
    ranks = mesh[0] * mesh[1]
    found = run_world(ranks, _back_to_back, cases.job_name(), mesh, 300, 1, timeout_seconds=90)
    assert found == [[]] * ranks


@pytest.mark.long
@pytest.mark.parametrize("mesh", [(1, 8), (4, 2), (2, 4), (8, 1)], ids=_name)
def test_thousands_of_calls_back_to_back(mesh: tuple[int, int]) -> None:
    """As above, longer and with more ranks."""
    found = run_world(8, _back_to_back, cases.job_name(), mesh, 5000, 2, timeout_seconds=500)
    assert found == [[]] * 8
