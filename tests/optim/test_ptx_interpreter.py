"""The PTX interpreter against cases worked out by hand from the PTX ISA."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.optim.ptx_interpreter import Machine, bits_of_float, float_of_bits
from tests.optim.ptx_memory import GlobalMemory, MemoryFault
from tests.optim.ptx_program import parse

_LANES = 32


def _run(
    body: str,
    inputs: NDArray[np.uint16],
    num_outputs: int,
    threads: int = _LANES,
    blocks: int = 1,
) -> NDArray[np.uint32]:
    """Run a body with %in and %out holding the addresses of the inputs and of 32-bit outputs."""
    ptx = f"""
.extern .shared .align 1024 .b8 smem[];
.visible .entry test(
    .param .u64 .ptr .global .align 16 p0,
    .param .u64 .ptr .global .align 16 p1
)
.reqntid {threads}, 1, 1
{{
    ld.param.b64 %in, [p0];
    ld.param.b64 %out, [p1];
    mov.u32 %tid, %tid.x;
    mov.b32 %smem, smem;
{body}
    ret;
}}
"""
    memory = GlobalMemory()
    outputs = np.zeros(num_outputs, np.uint32)
    addresses = [
        memory.allocate(inputs),
        memory.allocate(outputs.view(np.uint16), writable=True),
    ]
    Machine(parse(ptx), addresses, memory, [(x, 0) for x in range(blocks)], 2048).run()
    return outputs


# Thread t stores words 8 t .. 8 t + 7 of the input at 16 t of shared memory.
_FILL_SHARED = """
    mul.wide.u32 %offset, %tid, 16;
    add.s64 %from, %in, %offset;
    ld.global.v4.b32 {%x0, %x1, %x2, %x3}, [%from];
    shl.b32 %row, %tid, 4;
    add.s32 %row, %row, %smem;
    st.shared.v4.b32 [%row], {%x0, %x1, %x2, %x3};
"""

# Thread t stores %r0 .. %r3 at 32-bit outputs 4 t .. 4 t + 3.
_STORE_FOUR = """
    mul.wide.u32 %place, %tid, 16;
    add.s64 %to, %out, %place;
    st.global.v4.b32 [%to], {%r0, %r1, %r2, %r3};
"""


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_gives_each_lane_its_pair(transposed: bool) -> None:
    """ldmatrix: lane l holds elements 2 (l mod 4) and the next of row l / 4 of each matrix."""
    load = "ldmatrix.sync.aligned.m8n8.x4" + (".trans" if transposed else "") + ".shared.b16"
    body = _FILL_SHARED + "bar.sync 0;\n" + load + " {%r0, %r1, %r2, %r3}, [%row];" + _STORE_FOUR
    outputs = _run(body, np.arange(256, dtype=np.uint16), 4 * _LANES)
    pairs = outputs.view(np.uint16).reshape(_LANES, 4, 2)
    # Element e of row r of matrix x is 64 x + 8 r + e.
    if transposed:
        assert pairs[0, 0].tolist() == [0, 8]
        assert pairs[5, 2].tolist() == [128 + 8 * 2 + 1, 128 + 8 * 3 + 1]
        assert pairs[31, 3].tolist() == [192 + 8 * 6 + 7, 192 + 8 * 7 + 7]
    else:
        assert pairs[0, 0].tolist() == [0, 1]
        assert pairs[5, 2].tolist() == [128 + 8 * 1 + 2, 128 + 8 * 1 + 3]
        assert pairs[31, 3].tolist() == [192 + 8 * 7 + 6, 192 + 8 * 7 + 7]


# (lane, register, half) of the one element of A and of B, and (lane, index) of the one of C that
# their product shows in; None where k differs. With g = lane / 4 and t = lane mod 4: A's element
# is at row g (+ 8 in registers 1 and 3), k = 2 t + half (+ 8 in registers 2 and 3); B's at
# k = 2 t + half (+ 8 in register 1), column g; C's at row g (+ 8 for index 2 and 3), column
# 2 t + index mod 2.
_ONE_ELEMENT = [
    # A[9, 11] B[11, 3] -> C[9, 3]: g = 1, + 8, 2 t + 1 = 3.
    ((5, 3, 1), (13, 1, 1), (5, 3)),
    # A[9, 11] B[13, 3]: nothing.
    ((5, 3, 1), (14, 1, 1), None),
    # A[7, 6] B[6, 0] -> C[7, 0].
    ((31, 0, 0), (3, 0, 0), (28, 0)),
    # A[8, 1] B[1, 7] -> C[8, 7]: g = 0, + 8, t = 3.
    ((0, 1, 1), (28, 0, 1), (3, 3)),
    # A[2, 8] B[8, 4] -> C[2, 4]: g = 2, t = 2.
    ((8, 2, 0), (16, 1, 0), (10, 0)),
    # A[10, 4] B[4, 6] -> C[10, 6]: g = 2, + 8, t = 3.
    ((10, 1, 0), (26, 0, 0), (11, 2)),
]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize(("at_a", "at_b", "at_c"), _ONE_ELEMENT)
def test_mma_multiplies_the_documented_elements(
    at_a: tuple[int, int, int],
    at_b: tuple[int, int, int],
    at_c: tuple[int, int] | None,
    kind: str,
) -> None:
    """mma.m16n8k16: one element in A and one in B meet where the ISA's figures say."""
    halves = np.zeros((_LANES, 8, 2), np.uint16)  # per lane: 4 registers of A, 2 of B, 2 unused
    one = bits_of_float(np.array([1, 3], np.float32), kind)
    halves[at_a] = one[1]
    halves[at_b[0], 4 + at_b[1], at_b[2]] = one[0]
    body = f"""
    mul.wide.u32 %offset, %tid, 32;
    add.s64 %from, %in, %offset;
    ld.global.v4.b32 {{%a0, %a1, %a2, %a3}}, [%from];
    ld.global.v4.b32 {{%b0, %b1, %u0, %u1}}, [%from+16];
    mov.b32 %c, 0f40000000;
    mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32
        {{%r0, %r1, %r2, %r3}}, {{%a0, %a1, %a2, %a3}}, {{%b0, %b1}}, {{%c, %c, %c, %c}};
    """
    outputs = _run(body + _STORE_FOUR, halves, 4 * _LANES).view(np.float32).reshape(_LANES, 4)
    expected = np.full((_LANES, 4), 2, np.float32)
    if at_c is not None:
        expected[at_c] = 5
    np.testing.assert_array_equal(outputs, expected)


_COPY = """
    mul.wide.u32 %offset, %tid, 16;
    add.s64 %from, %in, %offset;
    shl.b32 %row, %tid, 4;
    add.s32 %row, %row, %smem;
    cp.async.cg.shared.global [%row], [%from], 16, 16;
    cp.async.commit_group;
"""
_NEIGHBOUR = """
    xor.b32 %other, %row, 16;
    ld.shared.v4.b32 {%r0, %r1, %r2, %r3}, [%other];
"""


def test_cp_async_arrives_after_wait_and_barrier() -> None:
    """A copy that was waited for, with a barrier after it, is seen by another thread."""
    words = np.arange(256, dtype=np.uint16)
    body = _COPY + "cp.async.wait_group 0;\nbar.sync 0;\n" + _NEIGHBOUR + _STORE_FOUR
    got = _run(body, words, 4 * _LANES).view(np.uint16).reshape(_LANES, 8)
    np.testing.assert_array_equal(got, words.reshape(_LANES // 2, 2, 8)[:, ::-1].reshape(-1, 8))


@pytest.mark.parametrize(
    ("between", "fault"),
    [
        ("bar.sync 0;\n", "not delivered"),
        ("cp.async.wait_group 1;\nbar.sync 0;\n", "not delivered"),
        ("cp.async.wait_group 0;\n", "another thread wrote"),
    ],
    ids=["no wait", "waits for the group before", "no barrier"],
)
def test_cp_async_read_too_early_is_a_fault(between: str, fault: str) -> None:
    """A forgotten wait, a wait for too few groups and a forgotten barrier end the run."""
    with pytest.raises(MemoryFault, match=fault):
        _run(_COPY + between + _NEIGHBOUR + _STORE_FOUR, np.zeros(256, np.uint16), 4 * _LANES)


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("ld.global.b32 %r0, [%in+8];", "global load"),
        ("ld.global.b32 %r0, [%in+2];", "misaligned"),
        ("ld.global.b32 %r0, [%out];", "global load"),
        ("st.global.b32 [%in], %tid;", "global store"),
        ("st.shared.b32 [%smem+2048], %tid;", "outside the memory"),
        ("st.shared.b32 [%smem], %tid;", "two threads store"),
        ("add.s32 %r0, %tid, %r1;", "read before it is written"),
        ("vote.sync.any.pred %p, %q, -1;", "no vote"),
    ],
)
def test_wrong_accesses_end_the_run(body: str, fault: str) -> None:
    """Out of bounds, misaligned, foreign, racing, undefined and unknown: errors, not guesses."""
    with pytest.raises(AssertionError, match=fault):
        _run(body, np.zeros(4, np.uint16), 1)


def test_shared_memory_starts_as_nan() -> None:
    """What is read before it was written can not pass for a number."""
    body = "shl.b32 %row, %tid, 4;\nadd.s32 %row, %row, %smem;\n"
    body += "ld.shared.v4.b32 {%r0, %r1, %r2, %r3}, [%row];" + _STORE_FOUR
    words = _run(body, np.zeros(8, np.uint16), 4 * _LANES).view(np.uint16)
    assert np.isnan(float_of_bits(words, "f16")).all()
    assert np.isnan(float_of_bits(words, "bf16")).all()


def test_threads_that_diverge_meet_again() -> None:
    """Each thread runs its own number of turns of a loop, then all take part in a shuffle."""
    body = """
    mov.b32 %r0, 0;
    mov.b32 %turn, 0;
$again:
    setp.ge.u32 %done, %turn, %tid;
    @%done bra $out;
    add.s32 %r0, %r0, %turn;
    add.s32 %turn, %turn, 1;
    bra $again;
$out:
    shfl.sync.idx.b32 %r1, %r0, 31, 31, -1;
    mov.b32 %r2, 0;
    mov.b32 %r3, 0;
    """
    outputs = _run(body + _STORE_FOUR, np.zeros(8, np.uint16), 4 * _LANES).reshape(_LANES, 4)
    assert outputs[:, 0].tolist() == [t * (t - 1) // 2 for t in range(_LANES)]
    assert set(outputs[:, 1].tolist()) == {31 * 30 // 2}


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("bar.sync 0;", "never reach"),
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r0}, [%smem];", "part of its threads"),
    ],
)
def test_divergence_where_it_is_forbidden_ends_the_run(body: str, fault: str) -> None:
    """A barrier that only some threads reach, and an ldmatrix by half a warp."""
    diverged = f"setp.lt.u32 %p, %tid, 16;\n@%p bra $skip;\n{body}\n$skip:\n"
    with pytest.raises(AssertionError, match=fault):
        _run(diverged, np.zeros(8, np.uint16), 1)


def test_blocks_have_shared_memory_of_their_own() -> None:
    """Two blocks that use the same shared addresses do not see each other."""
    body = """
    mov.u32 %block, %ctaid.x;
    shl.b32 %row, %tid, 2;
    add.s32 %row, %row, %smem;
    mad.lo.s32 %value, %block, 1000, %tid;
    st.shared.b32 [%row], %value;
    bar.sync 0;
    xor.b32 %other, %row, 4;
    ld.shared.b32 %r0, [%other];
    mad.lo.s32 %index, %block, 32, %tid;
    mul.wide.u32 %place, %index, 4;
    add.s64 %to, %out, %place;
    st.global.b32 [%to], %r0;
    """
    outputs = _run(body, np.zeros(8, np.uint16), 2 * _LANES, blocks=2)
    assert outputs.tolist() == [1000 * (i // 32) + (i % 32 ^ 1) for i in range(2 * _LANES)]


def test_rounding_to_half_types() -> None:
    """float32 to float16 and bfloat16 rounds to nearest, ties to even; cvt packs high, then low."""
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 65520, -0.0, np.nan], np.float32)
    bf16 = float_of_bits(bits_of_float(values, "bf16"), "bf16")
    np.testing.assert_array_equal(bf16, [1, 1 + 2**-6, 1, 65536, -0.0, np.nan])
    f16 = float_of_bits(bits_of_float(values, "f16"), "f16")
    np.testing.assert_array_equal(f16, [1 + 2**-8, 1 + 3 * 2**-8, 1, np.inf, -0.0, np.nan])
    body = """
    mov.b32 %one, 0f3F800000;
    mov.b32 %two, 0f40000000;
    cvt.rn.f16x2.f32 %r0, %one, %two;
    mov.b32 {%low, _}, %r0;
    cvt.f32.f16 %r1, %low;
    mov.b32 %r2, {%low, %low};
    mov.b32 %r3, 0;
    """
    outputs = _run(body + _STORE_FOUR, np.zeros(8, np.uint16), 4 * _LANES)
    assert outputs[:3].tolist() == [0x3C004000, 0x40000000, 0x40004000]
