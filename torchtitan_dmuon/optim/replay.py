"""CUDA graphs of whole Newton-Schulz iterations: recorded once per shape, then replayed (C.3).

One iteration is twenty to thirty small kernels, and a rank runs dozens of iterations per step over
a handful of shapes. A replay costs the host next to nothing. Learning rate and weight decay are
applied outside, so that changing them records nothing anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from torchtitan_dmuon.optim.newton_schulz import newton_schulz

logger = logging.getLogger("torchtitan_dmuon")


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded iteration.

    Attributes:
        source: What a replay reads; same shape, dtype and device in every replay.
        result: What a replay writes.
        replay: Runs the kernels on the current stream.
    """

    source: torch.Tensor
    result: torch.Tensor
    replay: Callable[[], None]


Compute = Callable[[torch.Tensor], torch.Tensor]
Record = Callable[[Compute, torch.Tensor], Recording]


class Replays:
    """Runs a computation as it is the first time a key appears, records it the second time.

    The first run is where backends are timed and kernels compiled, which no recording may contain.

    Args:
        record: Records a computation on an input like the one given.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._seen: dict[Hashable, Recording | None] = {}
        self._failed: set[Hashable] = set()

    def run(self, key: Hashable, compute: Compute, source: torch.Tensor) -> torch.Tensor:
        """Return `compute(source)`, by a replay if there is a recording for the key.

        `key` must decide everything but the numbers in `source`: shape, dtype, options.
        """
        if key not in self._seen or key in self._failed:
            self._seen.setdefault(key, None)
            return compute(source)
        recording = self._seen[key]
        if recording is None:
            try:
                recording = self._record(compute, source)
            except RuntimeError as error:
                self._failed.add(key)
                logger.warning(
                    "Newton-Schulz of %s is not recorded as a CUDA graph and runs kernel by "
                    "kernel: %s",
                    tuple(source.shape),
                    str(error).splitlines()[0],
                )
                return compute(source)
            self._seen[key] = recording
        recording.source.copy_(source)
        recording.replay()
        # The next replay of the shape overwrites the result, whose reader may come later.
        return recording.result.clone()

    @property
    def recorded(self) -> int:
        """Number of keys that are replayed."""
        return sum(recording is not None for recording in self._seen.values())


def cuda_recorder(device: torch.device) -> Record:
    """Return what records CUDA graphs on a device, all in one memory pool.

    Graphs of one pool share the memory of what lives only inside them. That is safe because they
    are replayed one after another on one stream, and their inputs and results stay alive.
    """
    pool = torch.cuda.graph_pool_handle()

    def record(compute: Compute, source: torch.Tensor) -> Recording:
        with torch.cuda.device(device):
            static = torch.empty_like(source, memory_format=torch.contiguous_format)
            graph = torch.cuda.CUDAGraph()
            # thread_local: the threads of NCCL and of checkpoints go on calling CUDA meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                result = compute(static)
        return Recording(static, result, graph.replay)

    return record


@cache
def _replays(device: torch.device) -> Replays:
    return Replays(cuda_recorder(device))


def orthogonalize(matrix: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return `newton_schulz(matrix, **options)`; on a GPU by a CUDA graph from the second time on.

    Args:
        matrix: (rows, columns) or (count, rows, columns).
        options: Of `newton_schulz`; hashable.
    """
    if matrix.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return newton_schulz(matrix, **options)
    key = (tuple(matrix.shape), matrix.dtype, tuple(sorted(options.items(), key=lambda x: x[0])))
    return _replays(matrix.device).run(key, lambda x: newton_schulz(x, **options), matrix)
