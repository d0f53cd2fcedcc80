"""Arguments that the operators over shared memory refuse, and what is closed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch

from tests.operators.shm_cases import alone as _alone
from torchtitan_dmuon.comm import CommunicationError
from torchtitan_dmuon.comm.operators import Operators, Segment, place

pytestmark = pytest.mark.usefixtures("rank_server")


# -- bad tables -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone() -> Iterator[Operators]:
    operators = _alone()
    yield operators
    operators.close()


@pytest.mark.parametrize(
    "segments, message",
    [
        ([Segment(0, 16, 0, 0), Segment(24, 16, 0, 0)], "segment 1: offset 24 is not a multiple"),
        (
            [Segment(0, 40, 0, 0), Segment(32, 8, 0, 0)],
            "segment 1: offset 32 lies inside segment 0",
        ),
        # The padding of a segment is moved, so it belongs to it.
        (
            [Segment(0, 33, 0, 0), Segment(32, 8, 0, 0)],
            "segment 1: offset 32 lies inside segment 0",
        ),
        ([Segment(0, 16, 1, 0)], "segment 0: owner node 1, expected 0 to 0"),
        ([Segment(0, 16, 0, -1)], "segment 0: owner rail -1, expected 0 to 0"),
        ([Segment(0, 16, 0, 1 << 32)], "segment 0: owner rail 4294967296 is no rank"),
        ([Segment(-16, 16, 0, 0)], "segment 0: offset -16, expected 0 to"),
        ([Segment(0, 0, 0, 0)] * 65537, "segment 65536: a group holds at most"),
        # Before a plan of that size is built.
        (
            [Segment(0, 16, 0, 0), Segment(16, 1 << 42, 0, 0)],
            "segment 1: offset 16 and 4398046511104 bytes end behind the window's 65536 bytes",
        ),
        (
            [Segment(1 << 20, 0, 0, 0)],
            "segment 0: offset 1048576 and 0 bytes end behind the window",
        ),
        ([(0, 16, 0, 0)], "segment 0: is (0, 16, 0, 0), expected a Segment"),
        ([Segment(0.0, 16, 0, 0)], "segment 0: offset 0.0, expected 0 to"),  # type: ignore[arg-type]
    ],
    ids=[
        *("aligned", "overlap", "padding", "node", "rail", "wide_rail", "negative", "many"),
        *("beyond_window", "empty_beyond_window", "tuple", "float"),
    ],
)
def test_bad_tables_are_refused(alone: Operators, segments: list[Segment], message: str) -> None:
    """At construction, with the segment's number."""
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        alone.all_gather_v(segments, label="layer.3")
    assert "layer.3" in str(error.value)


def test_bad_reductions_are_refused(alone: Operators) -> None:
    """What only a reduction has: homes, elements, dtype."""
    cases_and_messages = [
        ([Segment(0, 16, 0, 0, home=8)], torch.float32, "segment 0: home 8 is not a multiple"),
        (
            [Segment(0, 16, 0, 0, home=0), Segment(16, 16, 0, 0, home=0)],
            torch.float32,
            "segment 1: home 0 lies inside segment 0",
        ),
        ([Segment(0, 6, 0, 0)], torch.float32, "segment 0: 6 bytes are no whole elements of 4"),
        ([Segment(0, 16, 0, 0)], torch.float64, "cannot reduce torch.float64, expected"),
        (
            [Segment(0, 16, 0, 0, home=1 << 16)],
            torch.float32,
            "segment 0: home 65536 and 16 bytes end behind the window's 65536 bytes",
        ),
    ]
    for segments, dtype, message in cases_and_messages:
        with pytest.raises(ValueError, match=re.escape(message)):
            alone.reduce_scatter_v(segments, dtype)


def test_bad_buffers_are_refused(alone: Operators) -> None:
    """A call on memory that others cannot reach, or on too little of it."""
    group = alone.all_gather_v([Segment(0, 4096, 0, 0)], label="layer.3")
    buffer = alone.empty(4096, torch.uint8)
    with pytest.raises(ValueError, match=r"layer\.3: the tensor is not in the window"):
        group(torch.zeros(4096, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"layer\.3: needs a contiguous tensor of 4096 bytes"):
        group(buffer[16:])
    with pytest.raises(ValueError, match=r"layer\.3: needs a contiguous tensor"):
        group(buffer.view(64, 64).t())
    uneven = alone.empty(4112, torch.uint8)[8:]
    with pytest.raises(ValueError, match=r"layer\.3: the tensor begins at byte 4104 .*of 16"):
        group(uneven)
    with pytest.raises(ValueError, match="buffer at 8 with 4096 bytes, expected a multiple of 16"):
        group._group.call(8)
    with pytest.raises(ValueError, match="an end inside the window's 65536 bytes"):
        group._group.call(65536 - 4080)
    with pytest.raises(ValueError, match="no room for 65536 bytes, 57328 of 65536 are left"):
        alone.empty(65536, torch.uint8)
    with pytest.raises(ValueError, match="expected a dense tensor, got list"):
        group([0] * 4096)  # type: ignore[arg-type]
    group.run(buffer)  # The window still works.


def test_bad_sums_are_refused() -> None:
    """Other dtypes would be added as what they are not; a sum over addends that others still read
    would change them. Both at the call, which leaves the stream as it was."""
    operators = _alone()
    shifted = operators.reduce_scatter_v(
        [Segment(0, 32, 0, home=16), Segment(32, 16, 0, home=0)], torch.float32, label="shifted"
    )
    straight = operators.reduce_scatter_v([Segment(0, 48, 0)], torch.float32, label="straight")
    buffer = operators.empty(32, torch.float32)
    for dtype in (torch.float16, torch.int32, torch.float64, torch.bfloat16):
        other = operators.empty(12, dtype)
        with pytest.raises(ValueError, match=f"straight: buffer is of {dtype}, the group of torch"):
            straight(other, buffer)
        with pytest.raises(ValueError, match=f"straight: reduced is of {dtype}, the group of"):
            straight.run(buffer, other)
    for group, reduced in [(shifted, buffer), (straight, buffer[4:]), (shifted, buffer[8:])]:
        for call in (group, group.run):
            with pytest.raises(ValueError, match=r"of (shifted|straight): .*overlaps the buffer"):
                call(buffer[:12], reduced)  # type: ignore[operator]
    buffer.copy_(torch.arange(32.0))
    straight(buffer, buffer).wait()
    shifted(buffer[:12], buffer[12:24]).wait()
    assert buffer[12:24].tolist() == [8.0, 9.0, 10.0, 11.0, *map(float, range(8))]
    operators.close()


@pytest.mark.parametrize("numel", [-1, -40, 1.5, "4", None])
def test_bad_sizes_are_refused(alone: Operators, numel: object) -> None:
    """A negative one would hand out memory that is in use."""
    with pytest.raises(ValueError, match=r"numel is .*, expected a whole number from 0"):
        alone.empty(numel, torch.uint8)  # type: ignore[arg-type]


def test_a_tensor_of_nothing_lies_anywhere(alone: Operators) -> None:
    """torch gives it no address."""
    nothing = alone.empty(0, torch.uint8)
    alone.all_gather_v([])(nothing).wait()


@pytest.mark.parametrize("label", [5, "a\0b"])
def test_bad_labels_are_refused(alone: Operators, label: object) -> None:
    """C would cut them."""
    with pytest.raises(ValueError, match="expected text without NUL"):
        alone.all_gather_v([], label=label)  # type: ignore[arg-type]


def test_what_is_closed_refuses_at_once() -> None:
    """Calls, groups and tensors: nothing waits for a limit."""
    operators = _alone()
    group = operators.all_gather_v([Segment(0, 64, 0)], label="layer.3")
    buffer = operators.empty(64, torch.uint8)
    operators.close()
    operators.close()
    for call in (
        lambda: group(buffer),
        lambda: group.run(buffer),
        lambda: operators.empty(1, torch.uint8),
        lambda: operators.all_gather_v([]),
        lambda: operators.reduce_scatter_v([], torch.float32),
        lambda: operators.publish([], buffer),
    ):
        with pytest.raises(CommunicationError, match="the operators are closed"):
            call()


def test_a_forked_process_is_refused() -> None:
    """It has the memory, but none of the threads, and its calls would count as its parent's."""
    operators = _alone()
    group = operators.all_gather_v([Segment(0, 64, 0)], label="layer.3")
    buffer = operators.empty(64, torch.uint8)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            group(buffer)
        except CommunicationError as error:
            status = 0 if "layer.3: the operators belong to process" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    operators.close()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rails": 0}, "ranks per node is 0, expected 1 to 72"),
        ({"nodes": 1025}, "nodes is 1025, expected 1 to 1024"),
        ({"rank": 1}, "rank is 1, expected 0 to nodes * ranks per node - 1"),
        ({"nodes": 4, "gather_nodes": 3}, "nodes of a gather is 3, expected a divisor"),
        ({"chunk_bytes": 24}, "chunks of 24 bytes, expected a multiple of 16"),
        ({"timeout": timedelta(0)}, "timeout of 0.0"),
        # C's integers would wrap around to good numbers.
        ({"nodes": (1 << 32) + 1}, "nodes is 4294967297, expected a number from -2147483648 to"),
        ({"rank": 1 << 32}, "rank is 4294967296, expected a number from"),
        ({"window_bytes": (1 << 64) + 16}, "user_bytes is 18446744073709551632, expected"),
        ({"chunk_bytes": -(1 << 32) + 64}, "chunk_bytes is -4294967232, expected a number from 0"),
        ({"slots": 1 << 32}, "slots is 4294967296, expected a number from"),
        ({"slots": 2.0}, "slots is 2.0, expected a number from"),
        ({"window_bytes": 0}, "window_bytes is 0, expected a whole number from 1"),
        ({"window_bytes": -17}, "window_bytes is -17, expected"),
        ({"window_bytes": "64k"}, "window_bytes is '64k', expected"),
        ({"timeout": 2}, "timeout is 2, expected a datetime.timedelta"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_meshes_are_refused(options: dict[str, object], message: str) -> None:
    """Before any memory is taken, with what was given and what is accepted."""
    with pytest.raises(ValueError, match=re.escape(message)):
        _alone(**options)


@pytest.mark.parametrize("job", ["", "a/b", "a" * 65, "a\0b", "a\n", b"a", None])
def test_bad_job_names_are_refused(job: str) -> None:
    """They become file names."""
    with pytest.raises(ValueError, match="expected 1 to 64 letters, digits or hyphens"):
        Operators.shm(job, nodes=1, rails=1, rank=0, window_bytes=16)


def test_laying_out_any_lengths() -> None:
    """Offsets are aligned, in order, and leave room for each length."""
    assert place([]) == ([], 0)
    assert place([0, 1, 16, 17]) == ([0, 0, 16, 32], 64)
    with pytest.raises(ValueError, match="length 1 is -32, expected 0 or more"):
        place([32, -32, 16])
